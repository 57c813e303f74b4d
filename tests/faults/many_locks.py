"""Holds many other locks while the clients run."""

from __future__ import annotations

from faults.checker import Violation
from faults.connection import Connection
from faults.environment import Environment

CHUNK = 1_000
HOLD_MS = 3_600_000


async def hold_many(env: Environment, count: int) -> list[int]:
    """Acquire `count` locks, half of them in a session, and disconnect; return their ids."""
    address = env.cluster.address(await env.cluster.leader())
    ids: list[int] = []
    for secret in (None, f"the secret of many in {env.seed}"):
        connection = await Connection.open(env.checker, address, set())
        if secret is not None:
            connection.send("hello", session=secret, sessionTimeout=HOLD_MS)
            await connection.next()
        for start in range(0, count // 2, CHUNK):
            for number in range(start, start + CHUNK):
                connection.send("request", resources=[f"exclusive:many/{secret}/{number}"], transactionTimeout=HOLD_MS)
            for _ in range(CHUNK):
                await connection.next()
                _, locked = await connection.next()
                ids.append(locked["id"])
        connection.abort()
    return ids


async def release_many(env: Environment, ids: list[int]) -> None:
    """Release the locks from another connection, and check that each is still held."""
    table = await env.cluster.query_leader("inspect", limit=1)
    address = env.cluster.address(await env.cluster.leader())
    if table["holdersTotal"] < len(ids):
        raise Violation(f"of {len(ids)} locks only {table['holdersTotal']} are still held")
    connection = await Connection.open(env.checker, address, set())
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        for id_ in chunk:
            connection.send("release", id=id_)
        for id_ in chunk:
            command, reply = await connection.next()
            if (command, reply.get("id"), reply.get("reason")) != ("released", id_, "success"):
                raise Violation(f"release of {id_}, which is held, got the reply {command} {reply}")
    connection.abort()
    # The session retains their final replies: end it.
    connection = await Connection.open(env.checker, address, set())
    connection.send("hello", session=f"the secret of many in {env.seed}", sessionTimeout=1)
    while (await connection.next())[0] != "welcome":
        pass
    connection.abort()
