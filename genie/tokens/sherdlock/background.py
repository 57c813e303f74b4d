"""What goes on beside the calls: it is begun again when it fails, until it is ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from genie.client.config import delays

T = TypeVar("T")

_log = logging.getLogger("genie.tokens")


class Attempts:
    """`worked()` says that the present attempt does what it is for: the next failure begins with the first delay."""

    __slots__ = ("_delays",)

    def __init__(self) -> None:
        self._delays = delays()

    def worked(self) -> None:
        """Things are well."""
        self._delays = delays()

    def delay_s(self) -> float:
        """How long to wait before the next attempt."""
        return next(self._delays)


async def again_and_again(what: str, once: Callable[[Attempts], Awaitable[None]]) -> NoReturn:
    """Do something that should never end, and once more whenever it does."""
    attempts = Attempts()
    while True:
        try:
            await once(attempts)
        except Exception as error:  # noqa: BLE001 - whatever a store or a connection can raise
            _log.warning("%s failed, and is begun again: %r", what, error)
        await asyncio.sleep(attempts.delay_s())
