"""For tests of the server's parts without sockets."""

import pytest

from genie import work_time


@pytest.fixture(autouse=True)
def _commands_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock with which the server measures its work.

    Otherwise a pause of the process in a test makes a connection busy, and its commands are executed later, or in another
    order, than the test expects. Tests of the time limits set a clock, or the limit, of their own.
    """
    monkeypatch.setattr(work_time, "now", lambda: 100.0)
