"""A lost connection is freed without the garbage collector, which hardly ever reads all objects: otherwise clients fill the memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genie.config import Limits
from genie.core import LockManager
from genie.observability.stats import Stats
from genie.roles import Starting
from genie.server import connection as connection_module
from genie.server.auth import Authenticator
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.peer import CommandHandler
from genie.server.pipeline import Pipeline
from genie.storage.memory import MemoryStore
from support.network.recording_transport import RecordingTransport

HELLO = b'{"command":"hello","payload":{"token":"a-token-of-16-characters"}}\n'
INPUTS = {
    "nothing": b"",
    "incomplete": b'{"comm',
    "no hello": b"x\n",
    "malformed hello": b'{"hello"}\n',
    "invalid hello": HELLO.replace(b'"token"', b'"note":1,"token"') + b"x\n",
    "unknown token": HELLO.replace(b"16", b"61"),
    "hello": HELLO,
    "commands": HELLO + b'{"command":"ping"}\n',
    "rejected hello": HELLO.replace(b'"token"', b'"protocol":7,"token"') + b'{"command":"ping"}\n',
    "invalid command": HELLO + b'{"command":"ping","payload":{"x":1}}\nx\n',
    "bye": HELLO + b'{"command":"bye"}\n',
}


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(connection_module, "LINGER_IDLE_S", 0.0)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leader() -> CommandHandler:
    return Pipeline(LockManager(), MemoryStore(), Limits(), Stats(), lambda: 0.0, lambda _: None)


def follower() -> CommandHandler:
    return FollowerHandler(Stats(), "genie", 1 << 20, Starting)


def living() -> int:
    return sum(isinstance(each, Connection) for each in gc.get_objects())


CASES = [(role, name) for role in (leader, follower) for name in INPUTS]


@pytest.mark.parametrize(("make_handler", "name"), CASES)
@pytest.mark.parametrize(("with_token", "limit"), [(True, 10), (False, 10), (False, 0)])
async def test_a_lost_connection_is_freed(
    make_handler: Callable[[], CommandHandler], name: str, with_token: bool, limit: int, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a-token-of-16-characters")
    authenticator = Authenticator(None, str(tmp_path / "token"), certificates_required=False, stats=Stats())
    limits = Limits(max_connections=limit)
    handler, admission, before = make_handler(), AdmissionControl(limits), living()
    for _ in range(3):
        connection = Connection(handler, limits, admission, authenticator if with_token else None)
        connection.connection_made(RecordingTransport(lambda _: None))
        if INPUTS[name] and not connection.closing:
            connection.data_received(INPUTS[name])
        for _ in range(5):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        del connection
    for _ in range(5):
        await asyncio.sleep(0)
    assert living() <= before + 1, "the pipeline may keep the last one that sent something"
