"""`genie explain`"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import inf
from typing import Any

import click

from genie.cli.format import clip, duration, printable, remaining, some
from genie.cli.inspect import COLUMNS, INDENT, TRANSACTION_COLUMNS, Row, blocker_lines
from genie.cli.options import (
    Querier,
    bare_name,
    checked_reply,
    json_option,
    one_line_errors,
    query,
    server_options,
    timeout_option,
)
from genie.protocol import codec
from genie.protocol.limits import MAX_ROWS
from genie.protocol.resources import EXCLUSIVE

SHOWN = 10
"""Waiting requests shown for each held resource: as many as the server lists blockers."""

Reply = dict[str, Any]
"""Payload of an `inspected`."""
Replies = dict[str, Any]
"""`asked` is the reply about the request, `blockers` has those about its blockers by id, and `lines` those about the
queues of the resources that it holds, by name."""


@click.command()
@click.argument("id", type=int)
@json_option
@server_options
@timeout_option
@one_line_errors
def explain(id: int, as_json: bool, host: str, port: int, namespace: str | None, timeout: float) -> None:
    """Explain why the request ID waits; or, if it is held, until when, and which requests wait for it.

    Shows the blockers, and what has to happen for the request to be granted. Later requests with a higher priority are
    still queued ahead of it. An ID that the server does not know, or that has ended, is an error.

    --json prints the replies of the server: about the request, its blockers (by id), and what it holds (by name).
    """
    replies = query(host, port, namespace, timeout, lambda client: _fetch(client, id))
    with checked_reply():
        text = "\n".join(_report(replies, time.time() * 1000))
    if not text:
        raise click.ClickException(f"request {id} does not exist or has ended")
    click.echo(codec.dumps(replies) if as_json else text)


async def _fetch(client: Querier, id: int) -> Replies:
    """Query what a report needs, one after another: a request may have ended in between."""
    asked = await client.inspected(id=id)
    with checked_reply():
        blockers = {blocker["id"]: None for row in asked["queue"] for blocker in row["blockers"]}
        names = {bare_name(resource): None for row in asked["holders"] for resource in row["resources"]}
    return {
        "asked": asked,
        "blockers": {str(blocker): await client.inspected(id=blocker) for blocker in blockers},
        "lines": {name: await client.inspected(resource=name, limit=MAX_ROWS, only="queue") for name in names},
    }


def _report(replies: Replies, now_ms: float) -> Iterator[str]:
    """Yield the lines of the report; none if there is no such request."""
    for row in replies["asked"]["queue"]:
        yield from _waiting(row, replies["blockers"], now_ms)
    for row in replies["asked"]["holders"]:
        yield from _held(row, replies["lines"], now_ms)


def _waiting(row: Row, blockers: dict[str, Reply], now_ms: float) -> Iterator[str]:
    yield f"{_who(row)} has waited for {duration(now_ms - row['since'])} and {_gives_up(row)}."
    yield f"Wants: {some(row['resources'], row['resourcesTotal'], COLUMNS - len('Wants: '))}"
    if not row["blockers"]:
        yield "Nothing blocks it any more."
        return
    yield f"Blocked by: {row['blockersTotal']:,}"
    yield from blocker_lines(row, now_ms)
    yield "It is granted when"
    states = {blocker["id"]: blocker["state"] for blocker in row["blockers"]}
    for id, state in states.items():
        yield f"{INDENT}{id} {_end(state, blockers[str(id)])}"
    more = row["blockersTotal"] - len(row["blockers"])
    if more > 0:
        yield f"{INDENT}and the {more:,} more no longer block it"
    ends = [holder["expiresIn"] for reply in blockers.values() for holder in reply["holders"]]
    if max(ends, default=0) > row.get("expiresIn", inf):
        yield "Unless a blocker releases earlier, it times out first."


def _end(state: str, reply: Reply) -> str:
    """Describe how a blocker that was in `state` stops blocking."""
    for holder in reply["holders"]:
        now = "releases" if state == "held" else "(granted since) releases"
        return f"{now} or times out: in {duration(holder['expiresIn'])} at the latest, unless it is extended"
    for waiter in reply["queue"]:
        return f"is granted and releases, or leaves: it {_gives_up(waiter)} if it still waits"
    return "has ended"


def _held(row: Row, lines: dict[str, Reply], now_ms: float) -> Iterator[str]:
    lasted, left = duration(now_ms - row["since"]), duration(row["expiresIn"])
    yield f"{_who(row)} has held for {lasted} and ends in {left}, unless it is extended."
    yield f"Holds: {some(row['resources'], row['resourcesTotal'], COLUMNS - len('Holds: '))}"
    waiters = [line for resource in row["resources"] for line in _waiters(row, resource, lines, now_ms)]
    if waiters:
        yield "Waiting for it:"
        yield from waiters
    unnamed = row["resourcesTotal"] - len(row["resources"])
    if unnamed > 0:
        yield f"The waiters of {unnamed:,} more of its resources are unknown: the server does not list them."
    elif not waiters:
        yield "No request waits for it."


def _waiters(row: Row, resource: str, lines: dict[str, Reply], now_ms: float) -> Iterator[str]:
    """Yield the requests that wait for this holder of a resource."""
    name = bare_name(resource)
    reply = lines[name]
    waiters = [waiter for waiter in reply["queue"] if _waits_for(waiter, row, resource)]
    for waiter in waiters[:SHOWN]:
        lasted = f" ({duration(now_ms - waiter['since'])}, {_gives_up(waiter)})"
        wanted = next((wanted for wanted in waiter["resources"] if bare_name(wanted) == name), name)
        line = f"└ {_who(waiter)} for {printable(wanted)}"
        yield INDENT + clip(line, COLUMNS - len(INDENT) - len(lasted)) + lasted
    if len(waiters) > SHOWN:
        yield INDENT + clip(f"└ and {len(waiters) - SHOWN:,} more for {resource}", COLUMNS - len(INDENT))
    unlisted = reply["queueTotal"] - len(reply["queue"])
    if unlisted > 0:
        yield INDENT + clip(
            f"└ {unlisted:,} more are in the queue, which the server did not list: {name}", COLUMNS - len(INDENT)
        )


def _waits_for(waiter: Row, holder: Row, resource: str) -> bool:
    """Return whether a request in the queue of a resource waits for this holder.

    A waiter waits for an exclusive holder, and for a shared one if it requests the resource exclusively. A row lists
    ten resources; if this one is not among them, the holder may still be listed as a blocker.
    """
    owner = waiter.get("transactionName")
    if owner is not None and owner == holder.get("transactionName"):
        return False
    name = bare_name(resource)
    if resource.startswith(EXCLUSIVE) or EXCLUSIVE + name in waiter["resources"]:
        return True
    return any((blocker["id"], blocker["resource"]) == (holder["id"], name) for blocker in waiter["blockers"])


def _gives_up(row: Row) -> str:
    """Describe when a waiting request times out."""
    return f"gives up in {remaining(row)}" if "expiresIn" in row else "never gives up"


def _who(row: Row) -> str:
    owner = row.get("transactionName")
    return str(row["id"]) if owner is None else f"{row['id']} of {clip(owner, TRANSACTION_COLUMNS)}"
