"""A lock manager under test: commands in short, events as tuples, invariants after every step."""

from __future__ import annotations

from genie import core
from simulator.invariants import check


def names(*resources: str) -> dict[str, tuple[str, ...]]:
    """`"A"` is exclusive, `"a:A"`... as in: `names("A", "shared:B")`."""
    return {
        "exclusive": tuple(r for r in resources if not r.startswith("shared:")),
        "shared": tuple(r.removeprefix("shared:") for r in resources if r.startswith("shared:")),
    }


class Driver:
    def __init__(self) -> None:
        self.manager = core.LockManager()
        self.now = 0.0
        self.requests: dict[int, core.Request] = {}

    def step(self, command: core.Command) -> list[core.Event]:
        events = self.manager.step(command, self.now)
        check(self.manager)
        for event in events:
            if isinstance(event, core.Queued | core.Granted | core.Taken):
                self.requests[event.request.id] = event.request
        return events

    def request(self, *resources: str, **options: object) -> list[tuple[object, ...]]:
        return log(self.step(core.Request(**names(*resources), **options)))  # type: ignore[arg-type]

    def release(self, id_: int) -> list[tuple[object, ...]]:
        return log(self.step(core.Release(id_)))

    def at(self, now: float) -> list[tuple[object, ...]]:
        self.now = now
        return log(self.step(core.Expire()))

    def queue(self, name: str) -> list[int]:
        resource = self.manager.table.lookup(name)
        if resource is None or resource.wait_queue is None:
            return []
        return [entry[2].id for entry in resource.wait_queue.entries()]

    def reload(self) -> None:
        """Dump the state and go on from the dump, as after a restart in which no client disconnected."""
        from genie.storage.redis.records import RecordDecoder, encode

        old, read = self.manager, RecordDecoder().decode
        self.manager = core.LockManager(old.next_id, old.next_fence)
        self.manager._outcomes = old._outcomes
        for request in [*old.table.held.values(), *old.table.waiting.values()]:
            again = read(request.id, encode(request))
            assert isinstance(again, core.Request)
            self.manager.adopt(again)
            self.requests[again.id] = again
        check(self.manager)


def log(events: list[core.Event]) -> list[tuple[object, ...]]:
    """What clients would hear, in short."""
    told: list[tuple[object, ...]] = []
    for event in events:
        match event:
            case core.Queued(request):
                told.append(("queued", request.id))
            case core.Granted(request) | core.Taken(request):
                told += [("queued", request.id), ("locked", request.id)]
            case core.Locked(request):
                told.append(("locked", request.id))
            case core.Released(request, reason):
                told.append(("released", request.id, str(reason)))
            case core.AlreadyEnded(id_, reason):
                told.append(("repeated", id_, str(reason)))
            case core.UnknownId(id_):
                told.append(("unknown", id_))
            case core.Extended(request):
                told.append(("extended", request.id))
            case core.NotHeld(request):
                told.append(("not held", request.id))
    return told
