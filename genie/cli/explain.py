"""`genie explain`: why a request waits, or which requests wait for a lock."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple, TypedDict

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
"""Maximum number of waiting requests that are shown for each held resource."""


class Replies(TypedDict):
    """The replies to `inspect` about one request and its surroundings."""

    request: Reply
    """About the request itself."""
    blockers: dict[str, Reply]
    """About each of its blockers, by the id."""
    queues: dict[str, Reply]
    """About the wait queue of each resource that it holds, by the name of the resource."""


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
        # Unlike sets, dicts keep the order of the reply.
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

    A last line says that the request times out first, if the blockers may hold their locks for longer.
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
    groups = _group_blockers(row)
    for id, state in groups.required.items():
        yield f"{INDENT}{id} {_unblock_condition(blocker_replies[str(id)], state)}"
    for resource, unit_holders in groups.unit_holders.items():
        yield from fold(INDENT, f"{resource} fits, after enough of these have ended:", columns)
        for id, state in unit_holders.items():
            yield f"{INDENT}{INDENT}{id} {_unblock_condition(blocker_replies[str(id)], state)}"
    unlisted = row["blockersTotal"] - len(row["blockers"])
    if unlisted > 0:
        quantity = "enough of the" if groups.unit_holders else "the"
        yield f"{INDENT}and {quantity} {unlisted:,} more no longer block it"
    if row.get("expiresIn", inf) < _latest_timeout_ms(groups, blocker_replies):
        yield "Unless a blocker releases earlier, it times out first."


class _BlockerGroups(NamedTuple):
    """The blockers of a waiting request. Each group maps ids of blockers to their states, `held` or `queued`."""

    required: dict[int, str]
    """The blockers that all must end."""
    unit_holders: dict[str, dict[int, str]]
    """For each resource of which the request asks for units, such as `2/10:NAME`, the blockers of which enough must end."""


def _group_blockers(row: Row) -> _BlockerGroups:
    """Return the blockers of a waiting request in groups."""
    counted_resources = {bare_name(resource): resource for resource in row["resources"] if resource[:1].isdigit()}
    groups = _BlockerGroups({}, {})
    for blocker in row["blockers"]:
        group = groups.required
        if blocker["mode"] == Mode.UNITS and blocker["resource"] in counted_resources:
            group = groups.unit_holders.setdefault(counted_resources[blocker["resource"]], {})
        group[blocker["id"]] = blocker["state"]
    return groups


def _latest_timeout_ms(groups: _BlockerGroups, blocker_replies: dict[str, Reply]) -> float:
    """Return the time in ms after which the timeouts of the held blockers have made room for the waiting request.

    All required blockers must end. For units, the first holder that times out may be enough.
    """
    timeouts_ms = {id: holder["expiresIn"] for id, reply in blocker_replies.items() for holder in reply["holders"]}
    latest_ms = [timeouts_ms[str(id)] for id in groups.required if str(id) in timeouts_ms]
    for unit_holders in groups.unit_holders.values():
        of_resource = [timeouts_ms[str(id)] for id in unit_holders if str(id) in timeouts_ms]
        if of_resource:
            latest_ms.append(min(of_resource))
    return max(latest_ms, default=0)


def _unblock_condition(reply: Reply, former_state: str) -> str:
    """Describe how a blocker stops blocking, from the reply about this blocker.

    `former_state` is the state of the blocker, `held` or `queued`, in the earlier reply about the waiting request. The
    blocker may have been granted, or have ended, since then.
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
    shown_waits = set[tuple[int, str]]()
    for resource in row["resources"]:
        waiters += _waiter_lines(row, resource, queue_replies[bare_name(resource)], now_ms, columns, shown_waits)
    if waiters:
        yield "Waiting for it:"
        yield from waiters
    unlisted = row["resourcesTotal"] - len(row["resources"])
    if unlisted > 0:
        yield f"The waiters of {unlisted:,} more of its resources are unknown: the server does not list them."
    elif not waiters:
        yield "No request waits for it."


def _waiter_lines(
    holder: Row, held: str, reply: Reply, now_ms: float, columns: int | None, shown_waits: set[tuple[int, str]]
) -> Iterator[str]:
    """Yield the lines of the requests that wait until `holder` releases the resource `held`, at most `MAX_WAITERS_SHOWN`.

    Further lines count the waiters that are not shown, and the requests that the server has not listed.

    Args:
        holder: the row of the lock.
        held: one of its resources, with the mode.
        reply: the wait queue of this resource, in which some requests may wait for other holders only.
        now_ms: the Unix time.
        columns: the width of the terminal, or None.
        shown_waits: the waiters that were shown for other resources of the lock, each as its id and the resource that it
            requested. A request for a subtree waits for all resources below it, but is shown only once. This function adds
            the waiters that it shows.

    """
    name = bare_name(held)
    waiters = [row for row in reply["queue"] if _waits_for(row, holder, held)]
    for waiter in waiters[:MAX_WAITERS_SHOWN]:
        overlapping = [each for each in waiter["resources"] if _overlap(bare_name(each), name)]
        requested = overlapping[0] if overlapping else name
        if (waiter["id"], requested) in shown_waits:
            continue
        shown_waits.add((waiter["id"], requested))
        details = f"{duration(now_ms - waiter['since'])}, {_wait_timeout(waiter)}"
        yield from fold(INDENT, f"└ {_request_name(waiter)} for {requested} ({details})", columns)
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
    transaction = waiter.get("transactionName")
    if transaction is not None and transaction == holder.get("transactionName"):
        return False
    if not resource.startswith(SHARED):
        return True
    name = bare_name(resource)
    if any(not text.startswith(SHARED) and _overlap(bare_name(text), name) for text in waiter["resources"]):
        return True
    return any((blocker["id"], blocker["resource"]) == (holder["id"], name) for blocker in waiter["blockers"])


def _overlap(one: str, other: str) -> bool:
    """Return whether two names are the same, or one is a subtree that contains the other."""
    if one == other:
        return True
    return (is_subtree(one) and contains(one, other)) or (is_subtree(other) and contains(other, one))


def _wait_timeout(row: Row) -> str:
    """Return when a waiting request times out, as a part of a sentence."""
    return f"times out in {remaining(row)}" if "expiresIn" in row else "has no timeout"


def _request_name(row: Row) -> str:
    return request_name(row["id"], row.get("transactionName"))
