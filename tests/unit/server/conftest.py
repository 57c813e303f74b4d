"""For tests of the server's parts without sockets."""

from types import SimpleNamespace

import pytest

from genie import opening_turns
from genie.server import connection, dispatcher, scheduler, turns


@pytest.fixture(autouse=True)
def _commands_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clocks of schedulers and turns, and lift the time limit of the lines before the first `hello`.

    Otherwise a pause of the process in a test makes a connection busy, and its commands are executed later, or in another
    order, than the test expects. Tests of the time limits set a clock, or the limit, of their own.
    """
    for module in (scheduler, turns):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(connection, "OPENING_QUANTUM_S", 3600.0)
    monkeypatch.setattr(opening_turns, "OPENING_BATCH_S", 3600.0)
    monkeypatch.setattr(dispatcher, "EXPENSIVE_S", 3600.0)
