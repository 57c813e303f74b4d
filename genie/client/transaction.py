"""Transactions of a client: the locks of one piece of work, which are released together.

This module is shared by `aio` and `sync`, whose classes send the requests.

After a deadlock all locks are released, and the work is repeated. Before it runs again, one request locks all names that the
earlier attempts have requested. A transaction that holds nothing cannot deadlock, and its request waits in order. So the
work cannot be the victim of a second deadlock with the same transactions, unless it requests other names.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypedDict
from weakref import WeakValueDictionary

from genie.client.commands import OnDisconnect, Request, RequestState, make_request
from genie.client.errors import copy_lock_lost
from genie.errors import LockLost
from genie.lock_modes import UnitCount
from genie.protocol.resources import EXCLUSIVE, merge, parse_resource, strongest

MAX_FIRST_PAUSE_S: Final = 0.05
"""Upper bound of the random pause after the first deadlock. The bound doubles with each deadlock, up to `MAX_PAUSE_S`."""
MAX_PAUSE_S: Final = 2.0
"""Upper bound of the random pause after any deadlock."""
MAX_WORK_NAME: Final = 64
"""Maximum number of characters that the name of a transaction takes from the name of its function."""


class TransactionOptions(TypedDict, total=False):
    """The options of each lock of a transaction, as in `client.acquire`."""

    queue_timeout: float | timedelta | None
    transaction_timeout: float | timedelta
    priority: float
    watchdog: bool
    on_disconnect: OnDisconnect
    note: str | None


def unique_name(work: Callable[..., object] | None = None) -> str:
    """Return a new name for a transaction: the name of its work, or "transaction", and a random number."""
    work_name = getattr(work, "__name__", "")
    prefix = work_name[:MAX_WORK_NAME] if work_name.isidentifier() else "transaction"
    return f"{prefix}-{secrets.randbelow(10**18)}"


class RunningNames:
    """The names of the transactions that run in one client.

    Requests with one name never block each other, so two transactions with one name would not be isolated.
    """

    def __init__(self) -> None:
        self._owners: WeakValueDictionary[str, object] = WeakValueDictionary()
        """The object that uses each name. A name is also free when its object is garbage collected, because an exception may
        interrupt the end of a transaction."""

    def add(self, name: str, owner: object) -> None:
        """Begin to use a name. Raises ValueError if a transaction of this client has the name."""
        if name in self._owners:
            raise ValueError(
                f"the transaction {name!r} runs in this client already, and requests with one name never block each other. "
                "The name identifies one transaction: leave it out, or make it unique. The key of an idempotent operation "
                "is not a name: two attempts with the same key must block each other"
            )
        self._owners[name] = owner

    def discard(self, name: str) -> None:
        """End the use of a name."""
        self._owners.pop(name, None)


class Attempts:
    """Counts the attempts of a transaction, and collects the resources that they have requested."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"attempts must be at least 1, not {limit!r}")
        self.wanted: dict[str, str] = {}
        """The resources that the attempts have requested so far, by name."""
        self._attempts_left = limit
        self._max_pause_s = MAX_FIRST_PAUSE_S

    def wanted_resources(self) -> list[str]:
        """Return the resources to lock before the next attempt, as `shared:NAME`, `exclusive:NAME` or `2/10:NAME`."""
        return list(self.wanted.values())

    def begin_retry(self, locks: TransactionLocks) -> float | None:
        """Count an attempt that has ended in a deadlock, and collect the resources that it has requested.

        Returns:
            The pause before the next attempt in seconds, which is random; None if no attempt is left.

        """
        self._attempts_left -= 1
        if self._attempts_left == 0:
            return None
        for name, resource in locks.asked.items():
            # Units are not added up, because each attempt requests the same units again.
            self.wanted[name] = strongest(resource, self.wanted.get(name, resource))
        pause_s = random.uniform(0, self._max_pause_s)  # noqa: S311 - not for cryptography
        self._max_pause_s = min(2 * self._max_pause_s, MAX_PAUSE_S)
        return pause_s


class TransactionLocks:
    """The requests of one attempt of a transaction. `options` are those of each request (`TransactionOptions`).

    Raises:
        ValueError, TypeError: if the name or an option is invalid.

    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.asked: dict[str, str] = {}
        """The resources that the work has requested, by name. Units of a name are added up."""
        self.requests: list[Request] = []
        self._reserved_units: dict[str, UnitCount] = {}
        """In a repeated attempt: by name, the units that its first request has locked, and the work has not requested yet."""
        self.ended = False
        """True if the block has ended, so that nothing may be locked any more."""
        self._options = options
        make_request("", ["checks the name and the options"], transaction=name, **options)

    @property
    def fence(self) -> int:
        """The greatest fencing token of the locks, or 0 if nothing was locked yet."""
        return max((request.fence for request in self.requests), default=0)

    def request(self, resources: Sequence[str], ref: str) -> Request:
        """Return a request for resources: a held request that has locked all of them, or a new one, which is WAITING.

        `ref` becomes the `ref` of a new request.

        Raises:
            RuntimeError: if the transaction has ended.
            LockLost: if a lock of the transaction was lost.
            ValueError, TypeError: if a resource is invalid.

        """
        self.check_not_ended()
        self.check_not_lost()
        request = make_request(ref, resources, transaction=self.name, **self._options)
        for resource in request.resources:
            name = parse_resource(resource)[1]
            self.asked |= merge([self.asked[name], resource]) if name in self.asked else {name: resource}
        for held in self.held():
            if all(self._covers(held, resource) for resource in request.resources):
                self._use_reserved_units(request.resources)
                return held
        self.requests.append(request)
        return request

    def begin_work(self) -> None:
        """Begin the work of a repeated attempt, whose first request has locked what the earlier attempts requested."""
        for resource in self.requests[0].resources:
            _, name, units = parse_resource(resource)
            if units is not None:
                self._reserved_units[name] = units
        self.asked.clear()  # the work requests the same resources again

    def _covers(self, held: Request, resource: str) -> bool:
        """Return whether a held request has locked a resource in the requested mode or a stronger one.

        Units are covered only by the units that the first request of a repeated attempt has locked: other calls lock
        further ones.
        """
        _, name, units = parse_resource(resource)
        if EXCLUSIVE + name in held.resources:
            return True
        if units is None:
            return resource in held.resources
        count, limit = units
        reserved_count, reserved_limit = self._reserved_units.get(name, (0, 0))
        return held is self.requests[0] and count <= reserved_count and reserved_limit <= limit

    def _use_reserved_units(self, resources: Sequence[str]) -> None:
        """Subtract the units of resources from the reserved units."""
        for _, name, units in map(parse_resource, resources):
            if units is not None and name in self._reserved_units:
                reserved_count, limit = self._reserved_units[name]
                self._reserved_units[name] = reserved_count - units[0], limit

    def check_not_ended(self) -> None:
        """Raise RuntimeError if the block has ended."""
        if self.ended:
            raise self.ended_error()

    def ended_error(self) -> RuntimeError:
        """Return the error of a call that waits for a lock when the block ends, or requests a lock later."""
        return RuntimeError(f"the transaction {self.name!r} has ended: lock resources only within its block")

    def lost_error(self) -> LockLost | None:
        """Return the error of the first lock of the transaction that was lost, or None."""
        for request in self.requests:
            if request.error is not None:
                return copy_lock_lost(request.error)
        return None

    def check_not_lost(self) -> None:
        """Raise LockLost if any lock of the transaction was lost."""
        error = self.lost_error()
        if error is not None:
            raise error

    def waiting(self) -> list[Request]:
        """Return the requests that still wait. At the end of the block, these are requests of other tasks or threads."""
        return [request for request in self.requests if request.state is RequestState.WAITING]

    def held(self) -> list[Request]:
        """Return the requests whose locks are held, and must be released at the end of the block."""
        return [request for request in self.requests if request.state is RequestState.HELD]


class TransactionInfo:
    """The attributes of a running transaction that `genie.Transaction` and `genie.sync.Transaction` have in common."""

    __slots__ = ("_locks",)

    def __init__(self, locks: TransactionLocks) -> None:
        self._locks = locks

    @property
    def name(self) -> str:
        """The name of the transaction: requests with this name do not block each other."""
        return self._locks.name

    @property
    def fence(self) -> int:
        """The greatest fencing token of the locks of this transaction, or 0 if nothing was locked yet."""
        return self._locks.fence
