"""Fixtures for pytest, an entry point of the package: a test names `genie_server` or `genie_client`, and imports nothing.

pytest imports this module in each run, so the server and the clients are imported only when a test uses a fixture.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import iscoroutinefunction, signature, unwrap
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    import genie

__all__ = ["ServerAddress", "genie_client", "genie_server"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `genie_explore`."""
    config.addinivalue_line(
        "markers",
        "genie_explore(seeds=1000, ...): run the async test function in many simulated worlds; see genie.testing.explore",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the marker `genie_explore` in many simulated worlds."""
    __tracebackhide__ = True  # pytest shows the error alone
    marker = pyfuncitem.get_closest_marker("genie_explore")
    if marker is None:
        return None
    from genie.testing import Violation, explore  # noqa: PLC0415 - see the module

    function = unwrap(pyfuncitem.obj)  # pytest-asyncio may have wrapped it
    arguments = {name: pyfuncitem.funcargs[name] for name in signature(function).parameters}
    if not iscoroutinefunction(function):
        raise TypeError(f"the marker genie_explore needs an async test function, which {pyfuncitem.name} is not")
    try:
        explore(lambda: function(**arguments), **marker.kwargs)
    except Violation as violation:
        if isinstance(violation.error, pytest.skip.Exception):
            raise violation.error from None
        raise
    return True


class ServerAddress(NamedTuple):
    """The address of the server of a test: `genie.connect(*genie_server)`."""

    host: str
    port: int


@pytest.fixture
def genie_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerAddress]:
    """Run a Genie server for one test, and return its address.

    The server runs in a thread, on a free port of 127.0.0.1, and keeps its locks in memory: each test begins without locks.
    GENIE_HOST and GENIE_PORT are its address, and no token or namespace is set, so that `genie.connect()` in the service
    under test and in its child processes connects to this server.
    """
    with _running_server() as address:
        monkeypatch.setenv("GENIE_HOST", address.host)
        monkeypatch.setenv("GENIE_PORT", str(address.port))
        for name in ("GENIE_TOKEN", "GENIE_TOKEN_FILE", "GENIE_NAMESPACE"):
            monkeypatch.delenv(name, raising=False)
        yield address


@pytest.fixture
def genie_client(genie_server: ServerAddress) -> Iterator[genie.sync.Client]:
    """Return a client for threads that is connected to `genie_server`. All of its locks end with the test."""
    from genie import sync  # noqa: PLC0415 - see the module

    with sync.connect(*genie_server) as client:
        yield client


@contextmanager
def _running_server() -> Iterator[ServerAddress]:
    """Run a server in a thread with an event loop of its own, so that blocking tests can use it."""
    try:
        from genie.testing import server  # noqa: PLC0415 - see the module
    except ModuleNotFoundError as error:
        hint = f"genie_server needs the package {error.name}: pip install 'genie-lock[server]'"
        raise ModuleNotFoundError(hint, name=error.name) from None

    started: Future[tuple[ServerAddress, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        stop = asyncio.Event()
        async with server() as (host, port):
            started.set_result((ServerAddress(host, port), asyncio.get_running_loop(), stop))
            await stop.wait()

    def run_in_thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run_in_thread, name="genie server", daemon=True)
    thread.start()
    address, loop, stop = started.result()
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


if find_spec("pytest_asyncio") is not None:
    import pytest_asyncio

    __all__ += ["genie_async_client"]

    @pytest_asyncio.fixture
    async def genie_async_client(genie_server: ServerAddress) -> AsyncIterator[genie.Client]:
        """Return a client for asyncio that is connected to `genie_server`. All of its locks end with the test."""
        from genie import connect  # noqa: PLC0415 - see the module

        async with connect(*genie_server) as client:
            yield client
