"""Structured logging to stdout: in console format on a terminal, otherwise as JSON."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, TextIO

import orjson
import structlog

from genie.text import is_printable, printable, printable_json

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "console", "json")


def configure(level: str, form: str) -> None:
    """Configure logging to stdout with the minimum `level` of `LEVELS`, in the format `form` of `FORMATS`.

    The format `auto` is `console` on a terminal, else `json`.
    """
    is_console = form == "console" or (form == "auto" and sys.stdout.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not is_console),
            structlog.processors.StackInfoRenderer(),
            *(_console_processors() if is_console else _json_processors()),
        ],
        wrapper_class=_Logger,
        logger_factory=_make_console_logger if is_console else _make_json_logger,
        cache_logger_on_first_use=True,
    )
    set_level(level)


def _console_processors() -> list[structlog.typing.Processor]:
    """Return the processors that convert an event to a line for a terminal."""
    colors = sys.stdout.isatty()
    return [
        _make_printable,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_write_traceback),
    ]


def _json_processors() -> list[structlog.typing.Processor]:
    """Return the processors that convert an event to a line of JSON."""
    return [
        _put_event_first,
        # Do not log the values of variables, which may be secrets such as the Redis password.
        structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
        structlog.processors.JSONRenderer(serializer=_dumps),
    ]


def _make_console_logger(*_: object) -> _TolerantLogger:
    """Return a logger that writes text to stdout."""
    return _TolerantLogger(structlog.PrintLogger(sys.stdout))


def _make_json_logger(*_: object) -> _TolerantLogger:
    """Return a logger that writes bytes to stdout."""
    return _TolerantLogger(structlog.BytesLogger(sys.stdout.buffer))


class _Logger(structlog.make_filtering_bound_logger(logging.DEBUG)):  # type: ignore[misc] # the base is made at run time
    """The class of all loggers.

    `set_level` replaces the methods of this class, because existing loggers keep their class.
    """


def set_level(level: str) -> None:
    """Set the minimum level of all loggers, also of loggers in use."""
    filtering = structlog.make_filtering_bound_logger(getattr(logging, level.upper()))
    for name, method in vars(filtering).items():
        if not name.startswith("__"):
            setattr(_Logger, name, method)


class _TolerantLogger:
    """Drops all log lines after a write to stdout has failed, so that the server outlives the process that reads its log."""

    def __init__(self, logger: structlog.PrintLogger | structlog.BytesLogger) -> None:
        self._write = logger.msg

    def msg(self, line: Any) -> None:
        """Write a log line. If that fails, drop this line and all later lines."""
        try:
            self._write(line)
        except (OSError, ValueError):
            self._write = lambda _: None

    debug = info = warning = error = msg


def _make_printable(_: object, __: str, event_dict: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape characters that could control the terminal: a path, a name or a reason may come from any client."""
    return {name: value if name == "exc_info" else _printable_value(value) for name, value in event_dict.items()}


def _printable_value(value: object) -> object:
    """Return a value unchanged if its text is printable, else its text with escaped characters."""
    text = value if isinstance(value, str) else repr(value)  # `repr` leaves invisible characters as they are
    return value if is_printable(text) else printable(text)


def _write_traceback(output: TextIO, error: structlog.typing.ExcInfo) -> None:
    """Write a traceback with escaped characters.

    The default of structlog would also write the values of variables, which may be secrets.
    """
    plain = io.StringIO()
    structlog.dev.plain_traceback(plain, error)
    output.write("\n".join(map(printable, plain.getvalue().split("\n"))))


def _put_event_first(_: object, __: str, event_dict: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Put `event` first in the JSON line."""
    return {"event": event_dict.pop("event", None), **event_dict}


def _dumps(value: object, **_: object) -> bytes:
    """Encode a log event as JSON. Values of other types become strings, and characters that could control a terminal are escaped."""
    encoded = orjson.dumps(value, default=str)
    return encoded if encoded.isascii() else printable_json(encoded)
