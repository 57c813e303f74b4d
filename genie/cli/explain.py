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
    Asker,
    as_known,
    ask,
    bare_name,
    json_option,
    patience_option,
    plain_errors,
    server_options,
)
from genie.protocol import codec
from genie.protocol.limits import MAX_ROWS
from genie.protocol.resources import EXCLUSIVE

SHOWN = 10
"""Waiting requests that are shown for each resource that a request holds: as many as the server names blockers."""

Answer = dict[str, Any]
"""An `inspected`."""
Answers = dict[str, Any]
"""`asked` is the answer about the request, `blockers` are those about who is in its way, by id, and `lines` those about
the resources that it holds, by name."""


@click.command()
@click.argument("id", type=int)
@json_option
@server_options
@patience_option
@plain_errors
def explain(id: int, as_json: bool, host: str, port: int, namespace: str | None, patience: float) -> None:
    """Why does the request ID wait? Or, if it is held: until when, and who waits for it?

    Shows who is in its way, and what has to happen for it to be granted. Requests that come later with a higher
    priority go ahead of it all the same. An ID that the server doesn't know, or that has ended, is an error.

    --json prints the server's answers as they are: about the request, about who is in its way (by id), and about what
    it holds (by name).
    """
    answers = ask(host, port, namespace, patience, lambda client: _question(client, id))
    with as_known():
        text = "\n".join(_report(answers, time.time() * 1000))
    if not text:
        raise click.ClickException(f"there is no request {id}: it has ended, or never was")
    click.echo(codec.dumps(answers) if as_json else text)


async def _question(client: Asker, id: int) -> Answers:
    """All that a report needs. One answer follows another, so a request may have ended in between."""
    asked = await client.inspected(id=id)
    with as_known():
        blockers = {blocker["id"]: None for row in asked["queue"] for blocker in row["blockers"]}
        names = {bare_name(resource): None for row in asked["holders"] for resource in row["resources"]}
    return {
        "asked": asked,
        "blockers": {str(blocker): await client.inspected(id=blocker) for blocker in blockers},
        "lines": {name: await client.inspected(resource=name, limit=MAX_ROWS, only="queue") for name in names},
    }


def _report(answers: Answers, now_ms: float) -> Iterator[str]:
    """Nothing, if there is no such request."""
    for row in answers["asked"]["queue"]:
        yield from _waiting(row, answers["blockers"], now_ms)
    for row in answers["asked"]["holders"]:
        yield from _held(row, answers["lines"], now_ms)


def _waiting(row: Row, blockers: dict[str, Answer], now_ms: float) -> Iterator[str]:
    yield f"{_who(row)} has waited for {duration(now_ms - row['since'])} and {_gives_up(row)}."
    yield f"Wants: {some(row['resources'], row['resourcesTotal'], COLUMNS - len('Wants: '))}"
    if not row["blockers"]:
        yield "Nobody is in its way any more."
        return
    yield f"In its way: {row['blockersTotal']:,}"
    yield from blocker_lines(row, now_ms)
    yield "It is granted when"
    states = {blocker["id"]: blocker["state"] for blocker in row["blockers"]}
    for id, state in states.items():
        yield f"{INDENT}{id} {_end(state, blockers[str(id)])}"
    more = row["blockersTotal"] - len(row["blockers"])
    if more > 0:
        yield f"{INDENT}and the {more:,} more are out of its way too"
    ends = [holder["expiresIn"] for answer in blockers.values() for holder in answer["holders"]]
    if max(ends, default=0) > row.get("expiresIn", inf):
        yield "If nobody releases before, it gives up first."


def _end(state: str, answer: Answer) -> str:
    """How one that was in the way when the request was asked about, as `state` says, will be out of it."""
    for holder in answer["holders"]:
        now = "releases" if state == "held" else "(granted by now) releases"
        return f"{now} or times out: in {duration(holder['expiresIn'])} at the latest, unless it is extended"
    for waiter in answer["queue"]:
        return f"is granted and releases, or leaves: it {_gives_up(waiter)} if it still waits"
    return "has ended by now"


def _held(row: Row, lines: dict[str, Answer], now_ms: float) -> Iterator[str]:
    lasted, left = duration(now_ms - row["since"]), duration(row["expiresIn"])
    yield f"{_who(row)} has held for {lasted} and ends in {left}, unless it is extended."
    yield f"Holds: {some(row['resources'], row['resourcesTotal'], COLUMNS - len('Holds: '))}"
    behind = [line for resource in row["resources"] for line in _behind(row, resource, lines, now_ms)]
    if behind:
        yield "Waiting for it:"
        yield from behind
    unnamed = row["resourcesTotal"] - len(row["resources"])
    if unnamed > 0:
        yield f"Who waits for {unnamed:,} more of its resources can't be told: the server doesn't name them."
    elif not behind:
        yield "Nobody waits for it."


def _behind(row: Row, resource: str, lines: dict[str, Answer], now_ms: float) -> Iterator[str]:
    """Who waits for one resource until this holder gives it back."""
    name = bare_name(resource)
    answer = lines[name]
    waiters = [waiter for waiter in answer["queue"] if _waits_for(waiter, row, resource)]
    for waiter in waiters[:SHOWN]:
        lasted = f" ({duration(now_ms - waiter['since'])}, {_gives_up(waiter)})"
        wanted = next((wanted for wanted in waiter["resources"] if bare_name(wanted) == name), name)
        line = f"└ {_who(waiter)} for {printable(wanted)}"
        yield INDENT + clip(line, COLUMNS - len(INDENT) - len(lasted)) + lasted
    if len(waiters) > SHOWN:
        yield INDENT + clip(f"└ and {len(waiters) - SHOWN:,} more for {resource}", COLUMNS - len(INDENT))
    untold = answer["queueTotal"] - len(answer["queue"])
    if untold > 0:
        yield INDENT + clip(
            f"└ {untold:,} more are in the line, which the server did not tell: {name}", COLUMNS - len(INDENT)
        )


def _waits_for(waiter: Row, holder: Row, resource: str) -> bool:
    """Whether one that is in the line of a resource waits for this holder of it.

    Whoever is in the line waits for an exclusive holder, and for a shared one if it wants the resource exclusively. A
    row names ten resources; where this one is not among them, the holder may still be named as a blocker.
    """
    owner = waiter.get("transactionName")
    if owner is not None and owner == holder.get("transactionName"):
        return False
    name = bare_name(resource)
    if resource.startswith(EXCLUSIVE) or EXCLUSIVE + name in waiter["resources"]:
        return True
    return any((blocker["id"], blocker["resource"]) == (holder["id"], name) for blocker in waiter["blockers"])


def _gives_up(row: Row) -> str:
    """When a waiting request times out."""
    return f"gives up in {remaining(row)}" if "expiresIn" in row else "never gives up"


def _who(row: Row) -> str:
    owner = row.get("transactionName")
    return str(row["id"]) if owner is None else f"{row['id']} of {clip(owner, TRANSACTION_COLUMNS)}"
