"""`genie release`: release locks, and cancel waiting requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from genie.cli.format import lock_text, natural_key
from genie.cli.inspect import request_lines
from genie.cli.options import bare_name, one_line
from genie.cli.output import print_lines
from genie.cli.query import Output, QueriedServer, Querier, Row, checked_reply, output_options, server_query
from genie.errors import Code, RequestRejected
from genie.protocol.limits import MAX_ROWS

MAX_CONCURRENT_COMMANDS = 100
MAX_RESOURCES = 10
"""Maximum number of resources that are listed for a lock, those with the prefix first."""
NOT_RELEASED = "not released"
"""The beginning of the text about a request that the server did not release."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ReleaseList:
    """The requests to release, as rows of an `inspected` message."""

    holders: list[Row]
    queue: list[Row]
    is_complete: bool
    """False if the server did not list all matching requests."""

    @property
    def ids(self) -> list[int]:
        """The ids in the order of release: waiting requests first, because the release of a holder could grant them."""
        return [row["id"] for row in (*self.queue, *self.holders)]


@click.command()
@click.argument("id", type=int, required=False)
@click.option("--transaction", metavar="NAME", help="Release all locks and waiting requests of this transaction.")
@click.option("--prefix", metavar="PREFIX", help="Release all locks on resources whose names start with PREFIX.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@output_options(wide=True)
@server_query
def release(
    server: QueriedServer, output: Output, id: int | None, transaction: str | None, prefix: str | None, yes: bool
) -> None:
    """End the lock ID, or cancel the waiting request ID, of any client.

    Prints the reason of its end: "success", or an earlier reason if it had already ended. An unknown ID is an error.

    --transaction and --prefix clean up after a crash. They list the requests and ask for confirmation. --prefix
    releases locks only: requests that wait for them are granted next. Locks granted after the list was made are not
    released. --json needs --yes.
    """
    if sum(given is not None for given in (id, transaction, prefix)) != 1:
        raise click.UsageError("give exactly one of ID, --transaction and --prefix.")
    if id is not None:
        if yes:
            raise click.UsageError("--yes requires --transaction or --prefix: an ID is released without confirmation.")
        reason = server.query(lambda client: client.release(id))
        output.print({"id": id, "reason": reason}, lambda *_: [f"{id} is released: {reason}"])
        return
    if output.as_json and not yes:
        raise click.UsageError("--json cannot ask for confirmation: add --yes.")
    if prefix == "":
        raise click.UsageError("--prefix must not be empty: that would release every lock.")
    if prefix is not None:
        targets = server.query(lambda client: _list_prefix(client, prefix))
    else:
        targets = server.query(lambda client: _list_transaction(client, str(transaction)))
    if not output.as_json:
        output.print(targets, _target_lines)
    if targets.ids and not yes:
        _confirm(len(targets.ids))
    if targets.ids or output.as_json:
        _release_and_print(server, targets, output)


def _release_and_print(server: QueriedServer, targets: ReleaseList, output: Output) -> None:
    """Release the listed requests, and print the outcome. Raises SystemExit if the server did not release one of them."""
    reasons = server.query(lambda client: _release_all(client, targets.ids))
    reason_by_id = dict(zip(targets.ids, reasons, strict=True))
    rows = [{"id": id_, "reason": reason} for id_, reason in reason_by_id.items()]
    output.print({"released": rows, "complete": targets.is_complete}, lambda *_: _outcome_lines(reason_by_id))
    if any(reason.startswith(NOT_RELEASED) for reason in reasons):
        raise SystemExit(1)


def _confirm(count: int) -> None:
    """Ask whether to release `count` requests. Raises click.ClickException if the answer is no, or if the input ends."""
    requests = "this request" if count == 1 else f"these {count:,} requests"
    try:
        is_confirmed = click.confirm(f"Release {requests}?")
    except click.Abort:
        print_lines("")  # ends the line of the question
        is_confirmed = False
    if not is_confirmed:
        raise click.ClickException("nothing was released")


async def _list_transaction(client: Querier, transaction: str) -> ReleaseList:
    """Query the locks and the waiting requests of a transaction."""
    held = await client.inspected(transaction=transaction, limit=MAX_ROWS, only="holders")
    waiting = await client.inspected(transaction=transaction, limit=MAX_ROWS, only="queue")
    with checked_reply():
        holders, queue = held["holders"], waiting["queue"]
        is_complete = len(holders) == held["holdersTotal"] and len(queue) == waiting["queueTotal"]
    # The replies are of different times. A request that is in both is listed only as a holder.
    held_ids = {row["id"] for row in holders}
    return ReleaseList(holders, [row for row in queue if row["id"] not in held_ids], is_complete)


async def _list_prefix(client: Querier, prefix: str) -> ReleaseList:
    """Query the locks on resources whose names start with `prefix`.

    The reply to `watch` contains the ids of the held locks. The details of each lock are then queried by `inspect`.
    """
    locks_by_id: dict[int, list[str]] = {}
    async with client.watch(prefix) as watch:
        await client.ping()  # the server replies in order, so the reply to `watch` has arrived before this one
        with suppress(TimeoutError):
            async with asyncio.timeout(0):  # read only the changes that have already arrived
                async for change in watch:
                    # A watch also reports the subtrees that contain the prefix. They do not start with it.
                    if change.state == "locked" and change.resource.startswith(prefix):
                        lock = lock_text(change.mode, change.resource, change.units, change.of)
                        locks_by_id.setdefault(change.id, []).append(lock)
        is_complete = not watch.truncated
    payloads = await _map_concurrently(list(locks_by_id), lambda id_: client.inspected(id=id_))
    with checked_reply():
        holders = [row for payload in payloads for row in payload["holders"]]
        for row in holders:  # the server lists ten resources, among which may be none with the prefix
            distinct_locks = dict.fromkeys([*locks_by_id[row["id"]], *row["resources"]])
            row["resources"] = list(distinct_locks)[:MAX_RESOURCES]
        holders.sort(key=lambda row: (_first_name_key(row, prefix), row["id"]))
    return ReleaseList(holders, [], is_complete)


def _first_name_key(row: Row, prefix: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts locks by the first of their names that start with the prefix."""
    names = map(bare_name, row["resources"])
    return min((natural_key(name) for name in names if name.startswith(prefix)), default=[])


async def _release_all(client: Querier, ids: list[int]) -> list[str]:
    """Release requests, and return a text for each, in the order of `ids`.

    The text is the reason of the request's end, or starts with `NOT_RELEASED` if the server rejected the release.
    """

    async def release_one(id_: int) -> str:
        try:
            return await client.release(id_)
        except RequestRejected as error:
            if error.code == Code.UNKNOWN_ID:  # the server has forgotten why it ended
                return "ended before"
            return f"{NOT_RELEASED}: {one_line(error)}"

    return await _map_concurrently(ids, release_one)


async def _map_concurrently(items: list[T], function: Callable[[T], Coroutine[Any, Any, R]]) -> list[R]:
    """Call an async function with each item, and return the results in the order of the items.

    At most `MAX_CONCURRENT_COMMANDS` calls run concurrently.
    """
    results: list[R] = []
    for start in range(0, len(items), MAX_CONCURRENT_COMMANDS):
        results += await asyncio.gather(*map(function, items[start : start + MAX_CONCURRENT_COMMANDS]))
    return results


def _target_lines(targets: ReleaseList, now_ms: float, columns: int | None) -> Iterator[str]:
    """Yield the lines that list the requests to release, before the user is asked to confirm."""
    if not targets.ids:
        yield "Nothing to release."
        return
    if targets.holders:
        yield f"Held: {len(targets.holders):,}"
        yield from request_lines(targets.holders, now_ms, columns)
    if targets.queue:
        yield f"Waiting: {len(targets.queue):,}"
        yield from request_lines(targets.queue, now_ms, columns, waiting=True)
    if not targets.is_complete:
        yield "The list is incomplete: run the command again afterwards."


def _outcome_lines(reason_by_id: dict[int, str]) -> Iterator[str]:
    """Yield the number of released requests, and for each other request why it ended earlier or was not released."""
    yield f"Released: {sum(reason == 'success' for reason in reason_by_id.values()):,}"
    for id_, reason in reason_by_id.items():
        if reason != "success":
            yield f"  {id_}: {reason}"
