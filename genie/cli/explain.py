"""`genie explain`: why a request waits, and when it is granted at the latest."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import click

from genie.cli.format import duration, fold, join_names, remaining, request_name
from genie.cli.inspect import INDENT, blocker_lines
from genie.cli.options import bare_name
from genie.cli.query import Output, QueriedServer, Querier, Reply, Row, checked_reply, output_options, server_query
from genie.core.special import contains
from genie.lock_modes import Mode, is_subtree
from genie.protocol.limits import MAX_ROWS
from genie.protocol.resources import SHARED

MAX_WAITERS_SHOWN = 10
"""Maximum waiting requests shown for each held resource. The server lists the same number of blockers per request."""

Replies = dict[str, Any]
"""The replies about one request. `request` is the reply about the request itself. `blockers` contains the replies about
its blockers, by id. `queues` contains the replies about the wait queues of the resources that it holds, by name."""


@click.command()
@click.argument("id", type=int)
@output_options(wide=False)
@server_query
def explain(server: QueriedServer, output: Output, id: int) -> None:
    """Explain why the request ID waits; or, if it is held, until when, and which requests wait for it.

    Shows the blockers, and what has to happen for the request to be granted. Later requests with a higher priority are
    still queued ahead of it. An ID that the server does not know, or that has ended, is an error.

    --json prints the replies of the server: about the request, its blockers (by id), and what it holds (by name).
    """
    replies = server.query(lambda client: _query_replies(client, id))
    if not replies["request"]["queue"] and not replies["request"]["holders"]:
        raise click.ClickException(f"request {id} does not exist or has ended")
    output.print(replies, _report_lines)


async def _query_replies(client: Querier, id: int) -> Replies:
    """Query a request, then each of its blockers, then the wait queues of the resources that it holds.

    The replies are not one snapshot: requests may end between two queries.
    """
    reply = await client.inspected(id=id)
    with checked_reply():
        # Dicts instead of sets, because dicts keep the order of the reply.
        blocker_ids = {blocker["id"]: None for row in reply["queue"] for blocker in row["blockers"]}
        names = {bare_name(resource): None for row in reply["holders"] for resource in row["resources"]}
    return {
        "request": reply,
        "blockers": {str(blocker_id): await client.inspected(id=blocker_id) for blocker_id in blocker_ids},
        "queues": {name: await client.inspected(resource=name, limit=MAX_ROWS, only="queue") for name in names},
    }


def _report_lines(replies: Replies, now_ms: float, columns: int | None = None) -> Iterator[str]:
    """Yield the lines of the report. Yield no line if the request does not exist."""
    for row in replies["request"]["queue"]:
        yield from _waiter_report(row, replies["blockers"], now_ms, columns)
    for row in replies["request"]["holders"]:
        yield from _holder_report(row, replies["queues"], now_ms, columns)


def _waiter_report(row: Row, blocker_replies: dict[str, Reply], now_ms: float, columns: int | None) -> Iterator[str]:
    """Yield the lines that describe a waiting request: its blockers, and how each blocker stops blocking.

    A last line says that the request times out first, if a blocker may hold its lock until after that timeout.
    """
    waited_for = duration(now_ms - row["since"])
    yield from fold("", f"{_request_name(row)} has waited for {waited_for} and {_wait_timeout(row)}.", columns)
    yield from fold("", f"Requests: {join_names(row['resources'], total=row['resourcesTotal'])}", columns)
    if not row["blockers"]:
        yield "No request blocks it any more."
        return
    yield f"Blocked by: {row['blockersTotal']:,}"
    yield from blocker_lines(row, now_ms, columns)
    yield "It is granted when"
    required, pools = _group_blockers(row)
    for id, state in required.items():
        yield f"{INDENT}{id} {_unblock_condition(state, blocker_replies[str(id)])}"
    for counted, blockers in pools.items():
        yield from fold(INDENT, f"{counted} fits, after enough of these have ended:", columns)
        for id, state in blockers.items():
            yield f"{INDENT}{INDENT}{id} {_unblock_condition(state, blocker_replies[str(id)])}"
    unlisted = row["blockersTotal"] - len(row["blockers"])
    if unlisted > 0:
        yield f"{INDENT}and {'enough of ' * bool(pools)}the {unlisted:,} more no longer block it"
    timeouts = {id: holder["expiresIn"] for id, reply in blocker_replies.items() for holder in reply["holders"]}
    # Units may be enough when the first holder times out; every other lock must end.
    latest = [timeouts.get(str(id), 0) for id in required]
    latest += [min(timeouts.get(str(id), inf) for id in blockers) for blockers in pools.values()]
    if row.get("expiresIn", inf) < max((each for each in latest if each < inf), default=0):
        yield "Unless a blocker releases earlier, it times out first."


def _group_blockers(row: Row) -> tuple[dict[int, str], dict[str, dict[int, str]]]:
    """Return the blockers that all must end, and for each resource of which the request asks for units, such as
    `2/10:NAME`, the blockers of which enough must end. Each group contains the states of the blockers by id.
    """
    counted = {bare_name(resource): resource for resource in row["resources"] if resource[:1].isdigit()}
    required: dict[int, str] = {}
    pools: dict[str, dict[int, str]] = {}
    for blocker in row["blockers"]:
        is_pooled = blocker["mode"] == Mode.UNITS and blocker["resource"] in counted
        group = pools.setdefault(counted[blocker["resource"]], {}) if is_pooled else required
        group[blocker["id"]] = blocker["state"]
    return required, pools


def _unblock_condition(former_state: str, reply: Reply) -> str:
    """Describe how a blocker stops blocking.

    `reply` is the reply about the blocker. `former_state` is the state of the blocker (`held` or `queued`) in the earlier
    reply about the waiting request. The blocker may have been granted, or have ended, since then.
    """
    for holder in reply["holders"]:
        verb = "releases" if former_state == "held" else "(granted since) releases"
        return f"{verb} or times out: in {duration(holder['expiresIn'])} at the latest, unless it is extended"
    for waiter in reply["queue"]:
        return f"is granted and releases, or ends: it {_wait_timeout(waiter)} if it still waits"
    return "has ended"


def _holder_report(row: Row, queue_replies: dict[str, Reply], now_ms: float, columns: int | None) -> Iterator[str]:
    """Yield the lines that describe a held request: when it times out, and which requests wait for it."""
    held_for, expires_in = duration(now_ms - row["since"]), duration(row["expiresIn"])
    sentence = f"{_request_name(row)} has held for {held_for} and ends in {expires_in}, unless it is extended."
    yield from fold("", sentence, columns)
    yield from fold("", f"Holds: {join_names(row['resources'], total=row['resourcesTotal'])}", columns)
    waiters = list[str]()
    seen = set[tuple[int, str]]()
    for resource in row["resources"]:
        waiters += _waiter_lines(row, resource, queue_replies[bare_name(resource)], now_ms, columns, seen)
    if waiters:
        yield "Waiting for it:"
        yield from waiters
    unlisted = row["resourcesTotal"] - len(row["resources"])
    if unlisted > 0:
        yield f"The waiters of {unlisted:,} more of its resources are unknown: the server does not list them."
    elif not waiters:
        yield "No request waits for it."


def _waiter_lines(
    holder: Row, held: str, reply: Reply, now_ms: float, columns: int | None, seen: set[tuple[int, str]]
) -> Iterator[str]:
    """Yield a line for each request that waits until `holder` releases the resource `held`, at most `MAX_WAITERS_SHOWN`.

    Further lines count the waiters that are not shown, and the requests that the server has not listed. `reply` contains the
    wait queue of the resource, in which some requests may wait for other holders only. `seen` are the waiters of other
    resources, and what they wait for: a request for a subtree waits for several locks below it. The function adds the waiters
    of this resource to `seen`.
    """
    name = bare_name(held)  # without the mode
    waiters = [row for row in reply["queue"] if _waits_for(row, holder, held)]
    for waiter in waiters[:MAX_WAITERS_SHOWN]:
        suffix = f" ({duration(now_ms - waiter['since'])}, {_wait_timeout(waiter)})"
        requested = next((each for each in waiter["resources"] if _overlap(bare_name(each), name)), name)
        if (waiter["id"], requested) in seen:
            continue
        seen.add((waiter["id"], requested))
        yield from fold(INDENT, f"└ {_request_name(waiter)} for {requested}{suffix}", columns)
    if len(waiters) > MAX_WAITERS_SHOWN:
        yield from fold(INDENT, f"└ and {len(waiters) - MAX_WAITERS_SHOWN:,} more for {held}", columns)
    unlisted = reply["queueTotal"] - len(reply["queue"])
    if unlisted > 0:
        text = f"└ {unlisted:,} more requests are in the wait queue of {name}; the server did not list them"
        yield from fold(INDENT, text, columns)


def _waits_for(waiter: Row, holder: Row, resource: str) -> bool:
    """Return whether a request in the wait queue of a resource waits for the request `holder`.

    The waiter waits for the holder if one of the two locks is not shared and the transactions differ. The server lists
    only ten resources of a waiter. If the resource is not listed, the mode of the waiter is unknown. Then the waiter
    waits for the holder if the holder is listed as a blocker.
    """
    owner = waiter.get("transactionName")
    if owner is not None and owner == holder.get("transactionName"):
        return False
    name = bare_name(resource)
    if not resource.startswith(SHARED):
        return True
    if any(not text.startswith(SHARED) and _overlap(bare_name(text), name) for text in waiter["resources"]):
        return True
    return any((blocker["id"], blocker["resource"]) == (holder["id"], name) for blocker in waiter["blockers"])


def _overlap(one: str, other: str) -> bool:
    """Return whether two resources are the same, or one is a subtree that contains the other."""
    return one == other or any(is_subtree(a) and contains(a, b) for a, b in ((one, other), (other, one)))


def _wait_timeout(row: Row) -> str:
    return f"times out in {remaining(row)}" if "expiresIn" in row else "has no timeout"


def _request_name(row: Row) -> str:
    return request_name(row["id"], row.get("transactionName"))
