"""Log lines: for people on a terminal, as JSON for programs."""

from __future__ import annotations

import logging
import sys

import orjson
import structlog

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "console", "json")


def configure(level: str, form: str) -> None:
    """Log to stdout from `level` on. `auto` is `console` where stdout is a terminal, else `json`."""
    console = form == "console" or (form == "auto" and sys.stdout.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not console),
        structlog.processors.StackInfoRenderer(),
    ]
    logger: structlog.PrintLoggerFactory | structlog.BytesLoggerFactory
    if console:
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty()))
        logger = structlog.PrintLoggerFactory(sys.stdout)
    else:
        processors += [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(serializer=_dumps),
        ]
        logger = structlog.BytesLoggerFactory(sys.stdout.buffer)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=logger,
        cache_logger_on_first_use=True,
    )


def _dumps(value: object, **_: object) -> bytes:
    return orjson.dumps(value, default=str)
