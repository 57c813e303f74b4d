"""A replica in a process of its own: it does what it is told by lines on its input, and says what it did.

    python token_replica.py HOST PORT STORE_URL

A line in is a `Job` as JSON. A line out is `{"ready": true}` once, then for each ask `{"ask", "outcome", …}`, and
`{"done": true}` behind the last of a job.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

import orjson

import genie
from genie.tokens import InsufficientFunds, SherdlockSelector, SpentAlready, SqlTokenStore, Token
from servers import WAIT_S

KIND = {"token_type": "Fiat", "identifier": "GBP"}


@dataclass
class Job:
    """`asks` at the same time from `owner`'s wallet. What is selected is spent: to `payee`, with the change back.

    With `hold` it is selected and nothing more.
    """

    name: str
    owner: str
    asks: list[int]
    payee: str = "payee"
    hold: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def say(**what: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(what) + b"\n")
    sys.stdout.buffer.flush()


async def ask(selector: SherdlockSelector, job: Job, number: int, amount: int) -> None:
    name = f"{job.name}-{number}"
    try:
        selection = await selector.select(amount, owner=job.owner, transaction=name, **KIND)
    except InsufficientFunds as error:
        say(ask=name, outcome=type(error).__name__, free=error.free, locked=error.locked)
        return
    spent = [token.id for token in selection.tokens]
    say(ask=name, outcome="selected", tokens=spent)
    if job.hold:
        await asyncio.Event().wait()
    async with selection:
        outputs = [Token(f"{name}-paid", job.payee, amount=amount, **KIND)]
        if selection.change:
            outputs.append(Token(f"{name}-change", job.owner, amount=selection.change, **KIND))
        try:
            await selection.spend(outputs)
        except SpentAlready as error:
            say(ask=name, outcome="SpentAlready", tokens=error.ids)
            return
    say(ask=name, outcome="spent", tokens=spent, outputs={token.id: token.amount for token in outputs})


async def main() -> None:
    host, port, url = sys.argv[1:]
    patient = {"connect_timeout": WAIT_S, "session_timeout": WAIT_S}
    async with genie.connect(host, int(port), **patient) as client, SqlTokenStore(url) as store:
        await client.ping()
        say(ready=True)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            job = Job(**orjson.loads(line))
            async with SherdlockSelector(client, store, **job.options) as selector:
                await asyncio.gather(*(ask(selector, job, number, amount) for number, amount in enumerate(job.asks)))
            say(done=True)


if __name__ == "__main__":
    asyncio.run(main())
