"""Transactions of a client: the locks of one piece of work, which are released together. After a deadlock the work is
repeated.

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
from genie.lock_modes import UnitCount
from genie.protocol.resources import EXCLUSIVE, merge, parse_resource, strongest

MAX_FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 2.0
"""Upper bound of the random pause after a deadlock. The bound is `MAX_FIRST_PAUSE_S` for the first pause, and doubles with
each deadlock up to this time."""
MAX_WORK_NAME: Final = 64
"""Characters of the name of a function that become part of the name of its transaction."""


class TransactionOptions(TypedDict, total=False):
    """The options of each lock of a transaction, as in `client.acquire`."""

    queue_timeout: float | timedelta | None
    transaction_timeout: float | timedelta
    priority: float
    watchdog: bool
    on_disconnect: OnDisconnect
    note: str | None


def unique_name(work: Callable[..., object] | None = None) -> str:
    """Return a name for a transaction that no other transaction has. It ends with digits, and begins with the work's name."""
    prefix = getattr(work, "__name__", "transaction")
    prefix = prefix[:MAX_WORK_NAME] if prefix.isidentifier() else "transaction"
    return f"{prefix}-{secrets.randbelow(10**18)}"


class RunningNames:
    """The names of the transactions that run in one client.

    Requests with one name never block each other, so two transactions with one name would not be isolated.
    """

    def __init__(self) -> None:
        self._owners: WeakValueDictionary[str, object] = WeakValueDictionary()
        """The object that uses a name. If an exception interrupts its end, the name is free when it is garbage collected."""

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
    """Counts the attempts of a transaction, and records the names that they have requested."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"attempts must be at least 1, not {limit!r}")
        self.wanted: dict[str, str] = {}
        """The resources that all attempts have requested, by name."""
        self._attempts_left = limit
        self._max_pause_s = MAX_FIRST_PAUSE_S

    def wanted_resources(self) -> list[str]:
        """Return the resources to lock before the next attempt, as `shared:NAME`, `exclusive:NAME` or `2/10:NAME`."""
        return list(self.wanted.values())

    def begin_retry(self, locks: TransactionLocks) -> float | None:
        """Use up one attempt after a deadlock. Return the random pause before the next attempt (s), or None if none is left.

        The next attempt first locks all names that earlier attempts asked for, so that it cannot deadlock on their order.
        """
        self._attempts_left -= 1
        if self._attempts_left == 0:
            return None
        for name, resource in locks.asked.items():
            # Not added up: each attempt asks for the same units.
            self.wanted[name] = strongest(resource, self.wanted.get(name, resource))
        pause_s = random.uniform(0, self._max_pause_s)  # noqa: S311 - not for cryptography
        self._max_pause_s = min(2 * self._max_pause_s, MAX_PAUSE_S)
        return pause_s


class TransactionLocks:
    """The requests of one attempt of a transaction. Each request has the `options`.

    Raises:
        ValueError, TypeError: if the name or an option is invalid.

    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.asked: dict[str, str] = {}
        """The requested resources by name. Units of a name are added up."""
        self.requests: list[Request] = []
        self._reserved: dict[str, UnitCount] = {}
        """By name, the units that the first request of a repeated attempt has locked, and that the work has not requested
        yet."""
        self.ended = False
        """True if the block has ended, so that nothing may be locked any more."""
        self._options = options
        make_request("", ["checks the name and the options"], transaction=name, **options)

    @property
    def fence(self) -> int:
        """The greatest fencing token of the locks; 0: nothing was locked."""
        return max((request.fence for request in self.requests), default=0)

    def request(self, resources: Sequence[str], ref: str) -> Request:
        """Return the request that locks resources: a held one that covers them, or a new one, which is WAITING.

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
                self._use_reserved(request.resources)
                return held
        self.requests.append(request)
        return request

    def begin_work(self) -> None:
        """Begin a repeated attempt, whose first request has locked what the earlier attempts asked for."""
        self._reserved = {
            name: asked for _, name, asked in map(parse_resource, self.requests[0].resources) if asked is not None
        }
        self.asked.clear()  # the work asks for the same names again, and units are added up

    def _covers(self, held: Request, resource: str) -> bool:
        """Return whether a held request has locked a resource in this mode or a stronger one.

        Each call locks further units, unless the first request of a repeated attempt has locked them.
        """
        _, name, asked = parse_resource(resource)
        if EXCLUSIVE + name in held.resources:
            return True
        if asked is None:
            return resource in held.resources
        count, limit = self._reserved.get(name, (0, 0))
        return held is self.requests[0] and asked[0] <= count and limit <= asked[1]

    def _use_reserved(self, resources: Sequence[str]) -> None:
        """Take the units of resources from the reserved ones."""
        for _, name, asked in map(parse_resource, resources):
            if asked is not None and name in self._reserved:
                count, limit = self._reserved[name]
                self._reserved[name] = count - asked[0], limit

    def check_not_ended(self) -> None:
        """Raise RuntimeError if the block has ended."""
        if self.ended:
            raise self.ended_error()

    def ended_error(self) -> RuntimeError:
        """Return the error of a call that waits for a lock when the block ends, or requests a lock later."""
        return RuntimeError(f"the transaction {self.name!r} has ended: lock in its block only")

    def check_not_lost(self) -> None:
        """Raise LockLost if any lock of the transaction was lost."""
        for request in self.requests:
            if request.error is not None:
                raise copy_lock_lost(request.error)

    def waiting(self) -> list[Request]:
        """Return the requests that still wait, in tasks or threads other than the one of the block."""
        return [request for request in self.requests if request.state is RequestState.WAITING]

    def held(self) -> list[Request]:
        """Return the requests whose locks must be released."""
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
        """The greatest fencing token of the locks of this transaction; 0 if it has locked nothing yet."""
        return self._locks.fence
