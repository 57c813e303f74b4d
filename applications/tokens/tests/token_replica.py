"""A replica in a separate process: executes jobs from its input, and reports their results.

    python token_replica.py HOST PORT STORE_URL

An input line is a `Job` as JSON. Output lines are `{"ready": true}` at the start, for each request `{"request",
"outcome", …}`, and `{"done": true}` at the end of a job.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

import orjson

import genie
from genie_tokens import InsufficientFunds, SherdlockSelector, SpentAlready, SqlTokenStore, Token

WAIT_S = 120.0
"""A generous limit for what must happen, as in the tests."""
KIND = {"token_type": "Fiat", "identifier": "GBP"}


@dataclass
class Job:
    """Concurrent selections of the amounts `requests` from the wallet of `owner`. Each is spent: the amount to `payee`, the
    change to `owner`.

    With `hold` the tokens are only selected, and held.
    """

    name: str
    owner: str
    requests: list[int]
    payee: str = "payee"
    hold: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def report(**what: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(what) + b"\n")
    sys.stdout.buffer.flush()


async def run_request(selector: SherdlockSelector, job: Job, number: int, amount: int) -> None:
    name = f"{job.name}-{number}"
    try:
        selection = await selector.select(amount, owner=job.owner, transaction=name, **KIND)
    except InsufficientFunds as error:
        report(request=name, outcome=type(error).__name__, free=error.free, locked=error.locked)
        return
    spent = [token.id for token in selection.tokens]
    report(request=name, outcome="selected", tokens=spent)
    if job.hold:
        await asyncio.Event().wait()
    async with selection:
        outputs = [Token(f"{name}-paid", job.payee, amount=amount, **KIND)]
        if selection.change:
            outputs.append(Token(f"{name}-change", job.owner, amount=selection.change, **KIND))
        try:
            await selection.spend(outputs)
        except SpentAlready as error:
            report(request=name, outcome="SpentAlready", tokens=error.ids)
            return
    report(request=name, outcome="spent", tokens=spent, outputs={token.id: token.amount for token in outputs})


async def main() -> None:
    host, port, url = sys.argv[1:]
    timeouts = {"connect_timeout": WAIT_S, "response_timeout": WAIT_S, "session_timeout": WAIT_S}
    async with genie.connect(host, int(port), **timeouts) as client, SqlTokenStore(url) as store:
        await client.ping()
        report(ready=True)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            job = Job(**orjson.loads(line))
            async with SherdlockSelector(client, store, **job.options) as selector:
                await asyncio.gather(
                    *(run_request(selector, job, number, amount) for number, amount in enumerate(job.requests))
                )
            report(done=True)


if __name__ == "__main__":
    asyncio.run(main())
