"""Structured logging to stdout: in console format on a terminal, otherwise as JSON."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from typing import Any, TextIO

import orjson
import structlog

from genie.text import is_printable, printable, printable_json

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "console", "json")


def configure(level: str, form: str) -> None:
    """Configure logging to stdout with the minimum `level`. Format `auto` is `console` on a terminal, else `json`."""
    console = form == "console" or (form == "auto" and sys.stdout.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not console),
        structlog.processors.StackInfoRenderer(),
    ]
    logger: Callable[..., _TolerantLogger]
    if console:
        processors.append(_make_printable)
        colors = sys.stdout.isatty()
        processors.append(structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_write_traceback))
        logger = lambda *_: _TolerantLogger(structlog.PrintLogger(sys.stdout))  # noqa: E731
    else:
        processors += [
            _put_event_first,
            # Do not log the values of variables, which may be secrets such as the Redis password.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(serializer=_dumps),
        ]
        logger = lambda *_: _TolerantLogger(structlog.BytesLogger(sys.stdout.buffer))  # noqa: E731
    structlog.configure(
        processors=processors, wrapper_class=_Logger, logger_factory=logger, cache_logger_on_first_use=True
    )
    set_level(level)


class _Logger(structlog.make_filtering_bound_logger(logging.DEBUG)):  # type: ignore[misc] # the base is made at run time
    """The class of all loggers. `set_level` replaces its methods, because loggers that exist keep their class."""


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
    """Escape what could control the terminal: a path, a name or a reason may come from any client.

    Other values than strings are printed as by `repr`, which leaves invisible characters as they are.
    """
    return {name: value if name == "exc_info" else _printable_value(value) for name, value in event_dict.items()}


def _printable_value(value: object) -> object:
    text = value if isinstance(value, str) else repr(value)
    return value if is_printable(text) else printable(text)


def _write_traceback(output: TextIO, error: structlog.typing.ExcInfo) -> None:
    """Write a traceback, escaped. The default of structlog also shows the values of variables, which may be secrets."""
    plain = io.StringIO()
    structlog.dev.plain_traceback(plain, error)
    output.write("\n".join(map(printable, plain.getvalue().split("\n"))))


def _put_event_first(_: object, __: str, event_dict: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Put `event` first in the JSON line."""
    return {"event": event_dict.pop("event", None), **event_dict}


def _dumps(value: object, **_: object) -> bytes:
    """Encode a log event as JSON; values of other types as strings. What could control a terminal is escaped."""
    encoded = orjson.dumps(value, default=str)
    return encoded if encoded.isascii() else printable_json(encoded)
