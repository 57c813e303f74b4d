"""Structured logging to stdout: in console format on a terminal, otherwise as JSON."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import orjson
import structlog

from genie.text import is_printable, printable, printable_json

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "console", "json")
MAX_WRITE_WAIT_MS = 50
"""How long a log line waits until stdout accepts it, or the next part of it, while the event loop waits as well."""
PART_BYTES = 4 << 10
"""A longer line is written in parts: a pipe that counts as writable has room for 4 KiB, and may wait for the rest."""


def configure(level: str, form: str) -> None:
    """Configure logging to stdout with the minimum `level` of `LEVELS`, in the format `form` of `FORMATS`.

    The format `auto` is `console` on a terminal, else `json`.
    """
    if sys.stdout is None:  # the process was started without an open stdout
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - it stays open
    is_console = form == "console" or (form == "auto" and sys.stdout.isatty())
    plain_logger = structlog.PrintLogger(sys.stdout) if is_console else structlog.BytesLogger(sys.stdout.buffer)
    logger = _TolerantLogger(plain_logger, sys.stdout)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not is_console),
            structlog.processors.StackInfoRenderer(),
            *(_console_processors() if is_console else _json_processors()),
        ],
        wrapper_class=_Logger,
        logger_factory=lambda *_: logger,
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
    """Omits log lines that cannot be written to stdout, so that the server neither waits for the process that reads its log,
    nor ends with it.
    """

    def __init__(self, logger: structlog.PrintLogger | structlog.BytesLogger, stream: TextIO) -> None:
        self._write: Callable[[Any], object] = logger.msg
        self._stream = stream
        self._lock = threading.RLock()
        """Held while a line is written, because threads log, too."""
        self._descriptor: int | None = None
        """The file descriptor of stdout. None if a test has replaced stdout by an object in memory."""
        with contextlib.suppress(OSError):
            self._descriptor = stream.fileno()
        self._omitted_count = 0
        """Number of lines that were omitted since the last line that was written."""
        self._unwritten = b""
        """The line that is being written, or the rest of a long one that stdout did not accept."""

    def msg(self, line: Any) -> None:
        """Write a log line if stdout accepts it soon. Otherwise omit it, and log later how many lines were omitted."""
        with self._lock:
            try:
                # After an omitted line, the next ones do not wait again.
                if self._is_writable(0 if self._omitted_count else MAX_WRITE_WAIT_MS) and self._write_rest():
                    self._write_line(line)
                else:
                    self._omitted_count += 1
            except (BrokenPipeError, ValueError):  # its reader has ended
                self._write, self._descriptor, self._unwritten = lambda _: None, None, b""
            except OSError:  # for example, the disk is full
                self._omitted_count += 1

    debug = info = warning = error = msg

    def _write_line(self, line: Any) -> None:
        """Write a log line. If lines were omitted before it, first write how many."""
        if self._omitted_count:
            omitted_count, self._omitted_count = self._omitted_count, 0
            structlog.get_logger().warning("log entries omitted", reason="stdout accepted none", count=omitted_count)
            if self._omitted_count or self._unwritten:  # the warning was not written either
                self._omitted_count = omitted_count + 1
                return
        if self._descriptor is None:
            self._write(line)
        else:  # not by `_write`, which fails if the encoding of stdout lacks a character of a name
            encoding = self._stream.encoding
            self._unwritten = (line if isinstance(line, bytes) else line.encode(encoding, "backslashreplace")) + b"\n"
            self._write_rest()

    def _write_rest(self) -> bool:
        """Write the rest of a long line in parts, as long as stdout accepts them. Return whether nothing is left."""
        while self._unwritten and self._is_writable(0 if self._omitted_count else MAX_WRITE_WAIT_MS):
            part, self._unwritten = self._unwritten[:PART_BYTES], self._unwritten[PART_BYTES:]
            self._stream.buffer.write(part)
            self._stream.buffer.flush()
        return not self._unwritten

    def _is_writable(self, wait_ms: int) -> bool:
        """Return whether stdout accepts a line, at the latest after `wait_ms`."""
        if self._descriptor is None:
            return True
        poll = select.poll()  # one for each call: threads log, too, and two of them must not wait with the same object
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(wait_ms))


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
