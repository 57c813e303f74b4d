"""`genie release`: end locks, and cancel waiting requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from genie.cli.format import natural_key, printable
from genie.cli.inspect import Row, holder_lines, waiter_lines
from genie.cli.options import (
    Querier,
    bare_name,
    checked_reply,
    json_option,
    one_line,
    one_line_errors,
    query,
    server_options,
    timeout_option,
)
from genie.errors import Code, RequestRejected
from genie.protocol import codec
from genie.protocol.limits import MAX_ROWS

MAX_CONCURRENT_COMMANDS = 100
"""Commands in flight."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Found:
    """Requests to release, as rows of `inspected`. `complete` is False if the server did not list all."""

    holders: list[Row]
    queue: list[Row]
    complete: bool

    @property
    def ids(self) -> list[int]:
        """Ids, waiting requests first: otherwise a release could grant one of them."""
        return [row["id"] for row in (*self.queue, *self.holders)]


@click.command()
@click.argument("id", type=int, required=False)
@click.option("--transaction", metavar="NAME", help="Release all locks and waiting requests of this transaction.")
@click.option("--prefix", metavar="PREFIX", help="Release all locks on resources whose names start with PREFIX.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@server_options
@timeout_option
@one_line_errors
def release(
    id: int | None,
    transaction: str | None,
    prefix: str | None,
    yes: bool,
    as_json: bool,
    host: str,
    port: int,
    namespace: str | None,
    timeout: float,
) -> None:
    """End the lock ID, or cancel the waiting request ID, of any client.

    Prints the reason of its end: "success", or an earlier reason if it had already ended. An unknown ID is an error.

    --transaction and --prefix clean up after a crash. They list the requests and ask for confirmation. --prefix
    releases locks only: requests that wait for them are granted next. Locks granted after the list was made are not
    released. --json needs --yes.
    """
    _check(id, transaction, prefix, yes=yes, as_json=as_json)

    def run(operation: Callable[[Querier], Coroutine[Any, Any, T]]) -> T:
        return query(host, port, namespace, timeout, operation)

    if id is not None:
        reason = run(lambda client: client.release(id))
        click.echo(codec.dumps({"id": id, "reason": reason}) if as_json else f"{id} is released: {reason}")
        return
    found = run(lambda client: _by_prefix(client, prefix) if prefix else _by_transaction(client, str(transaction)))
    if not as_json:
        with checked_reply():
            text = "\n".join(_listing(found, time.time() * 1000))
        click.echo(text)
    if found.ids and not yes:
        click.confirm(
            f"Release {'this request' if len(found.ids) == 1 else f'these {len(found.ids):,} requests'}?", abort=True
        )
    if found.ids or as_json:
        _report(found, run(lambda client: _release(client, found.ids)), as_json)


def _check(id: int | None, transaction: str | None, prefix: str | None, *, yes: bool, as_json: bool) -> None:
    """Raise a usage error where the arguments contradict each other."""
    if sum(choice is not None for choice in (id, transaction, prefix)) != 1:
        raise click.UsageError("give one of ID, --transaction and --prefix.")
    if id is not None and yes:
        raise click.UsageError("--yes requires --transaction or --prefix: an ID is released without confirmation.")
    if id is None and as_json and not yes:
        raise click.UsageError("--json cannot ask for confirmation: add --yes.")
    if prefix == "":
        raise click.UsageError("--prefix must not be empty: that would release every lock.")


async def _by_transaction(client: Querier, transaction: str) -> Found:
    """Find the locks and the waiting requests of a transaction."""
    rows: dict[str, list[Row]] = {}
    complete = True
    for part in ("holders", "queue"):
        only: Any = part
        payload = await client.inspected(transaction=transaction, limit=MAX_ROWS, only=only)
        with checked_reply():
            rows[part] = payload[part]
            complete = complete and len(rows[part]) == payload[f"{part}Total"]
    granted = {row["id"] for row in rows["holders"]}
    return Found(rows["holders"], [row for row in rows["queue"] if row["id"] not in granted], complete)


async def _by_prefix(client: Querier, prefix: str) -> Found:
    """Find the locks that hold a resource with this prefix: `watch` lists their ids, and `inspect` describes each."""
    ids: dict[int, None] = {}
    async with client.watch(prefix) as watch:
        await client.ping()  # replies are in order: the reply to `watch` has arrived
        with suppress(TimeoutError):
            async with asyncio.timeout(0):  # ends once all received changes are read
                async for change in watch:
                    if change.state == "locked":
                        ids[change.id] = None
        complete = not watch.truncated
    payloads = await _each([*ids], lambda id_: client.inspected(id=id_))
    with checked_reply():
        holders = [row for payload in payloads for row in payload["holders"]]
        holders.sort(key=lambda row: (_first_name(row, prefix), row["id"]))
    return Found(holders, [], complete)


def _first_name(row: Row, prefix: str) -> list[tuple[int, int, str]]:
    """Return the sort key of the first resource with this prefix; that of the first of all where no such one is listed."""
    names = [bare_name(resource) for resource in row["resources"]]
    with_prefix = [name for name in names if name.startswith(prefix)]
    return min(map(natural_key, with_prefix or names), default=[])


async def _release(client: Querier, ids: list[int]) -> list[str]:
    """Release each; return for each why it ended, or why it was not released."""

    async def release_one(id_: int) -> str:
        try:
            return await client.release(id_)
        except RequestRejected as error:
            if error.code == Code.UNKNOWN_ID:
                return "ended before"
            return f"not released: {one_line(error)}"

    return await _each(ids, release_one)


async def _each(items: list[T], call: Callable[[T], Coroutine[Any, Any, R]]) -> list[R]:
    """Call with each item, some of them at the same time; return the results in order."""
    results: list[R] = []
    for start in range(0, len(items), MAX_CONCURRENT_COMMANDS):
        results += await asyncio.gather(*map(call, items[start : start + MAX_CONCURRENT_COMMANDS]))
    return results


def _listing(found: Found, now_ms: float) -> Iterator[str]:
    if not found.ids:
        yield "Nothing to release."
        return
    if found.holders:
        yield f"Held: {len(found.holders):,}"
        yield from holder_lines(found.holders, now_ms)
    if found.queue:
        yield f"Waiting: {len(found.queue):,}"
        yield from waiter_lines(found.queue, now_ms)
    if not found.complete:
        yield "The list is incomplete: run the command again afterwards."


def _report(found: Found, reasons: list[str], as_json: bool) -> None:
    """Print the outcome of each; exit status 1 if the server rejected one."""
    ended = dict(zip(found.ids, reasons, strict=True))
    rejected = [reason for reason in reasons if reason.startswith("not released")]
    if as_json:
        rows = [{"id": id_, "reason": reason} for id_, reason in ended.items()]
        click.echo(codec.dumps({"released": rows, "complete": found.complete}))
    else:
        released = sum(reason == "success" for reason in reasons)
        click.echo(f"Released: {released:,}")
        for id_, reason in ended.items():
            if reason != "success":
                click.echo(f"  {id_}: {printable(reason)}")
    if rejected:
        raise SystemExit(1)
