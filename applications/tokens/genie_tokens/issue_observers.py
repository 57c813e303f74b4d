"""Observers of the tokens that this process adds to a store: selectors see these tokens at once.

The change feed reports the tokens too, but later: a store that several processes share reports all changes in one order, after
they have passed through the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable
from weakref import WeakSet

from genie_tokens.token import Token


class IssueObserver(Protocol):
    """Is notified before and after tokens are added. `StoreFollower` implements it."""

    def expect(self, outputs: Iterable[Token]) -> None:
        """Record from now on which of these tokens are spent: they are about to be added."""

    def on_issued(self, outputs: Iterable[Token]) -> None:
        """Handle that the tokens were added."""

    def stop_expecting(self, outputs: Iterable[Token]) -> None:
        """Stop recording: the tokens were added, or could not be added."""


class IssueObservers:
    """The observers of a store. The references are weak: an observer need not be removed."""

    def __init__(self) -> None:
        self._observers: WeakSet[IssueObserver] = WeakSet()

    def add(self, observer: IssueObserver) -> None:
        """Notify an observer of all tokens that are added from now on."""
        self._observers.add(observer)

    @contextmanager
    def issuing(self, tokens: Iterable[Token]) -> Iterator[None]:
        """Notify the observers before and after the block, which adds tokens or raises an exception."""
        observers = list(self._observers)
        for observer in observers:
            observer.expect(tokens)
        try:
            yield
            for observer in observers:
                observer.on_issued(tokens)
        finally:
            for observer in observers:
                observer.stop_expecting(tokens)


@runtime_checkable
class ObservableStore(Protocol):
    """A store that notifies observers. Both stores of the package do."""

    issue_observers: IssueObservers
