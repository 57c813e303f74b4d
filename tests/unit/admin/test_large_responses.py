"""The bytes of the responses that the admin port keeps in memory: cached ones, and ones that clients read slowly."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from typing import NoReturn

import pytest
from aiohttp.test_utils import make_mocked_request

from genie.admin import connections, throttle
from genie.admin.models import ApiError, error_middleware
from genie.admin.throttle import Body, ResponseCache, WorkBudget
from genie.server import memory_bounds

CHUNK = b"x" * (1 << 20)


def body(mebibytes: int) -> Body:
    return tuple(CHUNK for _ in range(mebibytes))


async def test_the_bytes_of_cached_responses_are_bounded() -> None:
    cache = ResponseCache(WorkBudget())
    for number in range(8):

        async def compute() -> Body:
            return body(9)

        await cache.get_or_compute(number, compute)
        cached = sum(len(chunk) for response in cache._cached.values() for chunk in response.body)
        assert 0 < cached <= throttle.MAX_CACHED_BYTES
    assert 7 in cache._cached, "the last one"


async def test_large_responses_that_are_sent_are_bounded_and_each_counts_once() -> None:
    cache, large = ResponseCache(WorkBudget()), body(30)
    with ExitStack() as clients:
        for _ in range(5):
            clients.enter_context(cache.sending(large))
        clients.enter_context(cache.sending(body(30)))
        with pytest.raises(ApiError) as rejection, cache.sending(body(30)):
            pass
        assert rejection.value.status == 503
        for _ in range(5):
            clients.enter_context(cache.sending(body(0)))
        assert cache.sent_bytes == 60 << 20
    assert cache.sent_bytes == 0
    assert not cache._clients
    with cache.sending(body(100)):
        assert cache.sent_bytes == 100 << 20, "one is sent, however large it is"


class Large:
    """What a handler has computed."""


async def test_a_rejected_response_is_freed_without_the_garbage_collector() -> None:
    computed: list[weakref.ref[Large]] = []

    async def handler(_: object) -> NoReturn:
        large = Large()
        computed.append(weakref.ref(large))
        raise ApiError(503, "too-many", "too many")

    gc.disable()
    try:
        response = await error_middleware(make_mocked_request("GET", "/"), handler)
        assert response.status == 503
        assert computed[0]() is None
    finally:
        gc.enable()


def test_the_bounds_of_memory_contain_the_limits_of_the_admin_port() -> None:
    """The server does not import the admin port."""
    assert connections.MAX_PENDING + connections.MAX_CONNECTIONS == memory_bounds.ADMIN_CONNECTIONS
    assert throttle.MAX_SENT_BYTES + throttle.MAX_CACHED_BYTES == memory_bounds.ADMIN_RESPONSE_BYTES
