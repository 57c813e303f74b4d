"""Signal dispositions that the test processes inherit, and what the programs that tests start inherit from them."""

from __future__ import annotations

import signal

IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
"""`subprocess` gives these back to the programs that it starts."""


def restore_defaults_for_children() -> None:
    """Let programs that this process starts begin with the default disposition of every signal.

    A shell lets what it starts in the background ignore SIGINT and SIGQUIT, nohup(1) adds SIGHUP, and a program inherits
    what its parent ignores. Genie's commands leave ignored signals ignored, so tests that send such a signal would wait
    forever. This process itself does not react to these signals afterwards either: a handler that does nothing replaces
    the disposition, and `exec` resets handlers to the default.
    """
    for number in signal.valid_signals() - IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _do_nothing)


def _do_nothing(_number: int, _frame: object) -> None:
    pass
