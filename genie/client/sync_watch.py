"""What threads watch."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from genie.client import watches
from genie.client.sync_link import Link
from genie.client.watches import Change


class Watch:
    """What `client.watch(…)` returns: `for change in` it, alone or inside `with`.

    It ends with `close`, which any thread may call, when the `with` block is left, when whoever waits for the next change
    is interrupted, or when nobody has it any more, as behind a `for` over `client.watch(…)` itself. Then, and when the
    client is closed, the iteration ends.
    """

    __slots__ = ("_connection", "_watch")

    def __init__(self, link: Link, watch: watches.Watch) -> None:
        self._connection = link
        self._watch = watch

    @property
    def prefix(self) -> str:
        """How the names begin."""
        return self._watch.prefix

    @property
    def truncated(self) -> bool:
        """Whether more was held than the server told when it was last asked: then the picture has gaps.

        What was locked then and is not told is missing. And of what was held before, and ended while there was no
        connection, the `unlocked` may be missing until somebody else locks it.
        """
        return self._watch.truncated

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        change = self._connection.next(self._watch)
        if change is None:
            raise StopIteration
        return change

    def close(self) -> None:
        """Watch no longer. A second time does nothing."""
        self._connection.unwatch(self._watch)

    def __enter__(self) -> Self:
        """Begin to watch: what happens from here on is told, whenever it is asked for."""
        self._connection.begin(self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._watch.ended:
            self._connection.drop(self._watch)
