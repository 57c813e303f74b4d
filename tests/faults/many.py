"""A great many locks that are held by others, while the clients go on."""

from __future__ import annotations

from faults.link import Link
from faults.watch import Broken
from faults.world import World

CHUNK = 1_000
HOLD_MS = 3_600_000


async def hold_many(w: World, count: int) -> list[int]:
    """Hold so many, each on a key of its own; returns their ids. The connections end: half of the locks are a session's."""
    address = w.cluster.address(await w.cluster.leader())
    ids: list[int] = []
    for secret in (None, f"the secret of many in {w.seed}"):
        link = await Link.open(w.watch, address, set())
        if secret is not None:
            link.send("hello", session=secret, sessionTimeout=HOLD_MS)
            await link.next()
        for start in range(0, count // 2, CHUNK):
            for number in range(start, start + CHUNK):
                link.send("request", resources=[f"exclusive:many/{secret}/{number}"], transactionTimeout=HOLD_MS)
            for _ in range(CHUNK):
                await link.next()
                _, told = await link.next()
                ids.append(told["id"])
        link.abort()
    return ids


async def release_many(w: World, ids: list[int]) -> None:
    """Each is still there: release it, from a connection that has nothing to do with it."""
    table = await w.cluster.ask("inspect", limit=1)
    address = w.cluster.address(await w.cluster.leader())
    if table["holdersTotal"] < len(ids):
        raise Broken(f"of {len(ids)} locks only {table['holdersTotal']} are left")
    link = await Link.open(w.watch, address, set())
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        for id_ in chunk:
            link.send("release", id=id_)
        for id_ in chunk:
            command, told = await link.next()
            if (command, told.get("id"), told.get("reason")) != ("released", id_, "success"):
                raise Broken(f"release of {id_}, which is held, was answered by {command} {told}")
    link.abort()
    # The session still has to be told of them: let it end.
    link = await Link.open(w.watch, address, set())
    link.send("hello", session=f"the secret of many in {w.seed}", sessionTimeout=1)
    while (await link.next())[0] != "welcome":
        pass
    link.abort()
