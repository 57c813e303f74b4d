"""Another process that uses a store of tokens: does what the lines of its input say, and answers each with a line.

python spending_process.py URL
{"add": ["a"]}                                     -> true
{"spend": [["T", ["a", "b"], ["c"]], ...]}         -> the transactions that have spent their tokens
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress

from genie_tokens.errors import SpentAlready
from genie_tokens.stores.sql import SqlTokenStore
from tokens_made import token


async def answer(store: SqlTokenStore, asked: dict[str, list]) -> object:
    if "add" in asked:
        await store.add([token(id) for id in asked["add"]])
        return True
    done: list[str] = []
    turns = asyncio.Semaphore(8)

    async def spend(transaction: str, ids: list[str], outputs: list[str]) -> None:
        async with turns:
            with suppress(SpentAlready):
                await store.spend([token(id) for id in ids], transaction=transaction, outputs=[*map(token, outputs)])
                done.append(transaction)

    await asyncio.gather(*(spend(*each) for each in asked["spend"]))
    return done


async def main(url: str) -> None:
    async with SqlTokenStore(url) as store:
        print("true", flush=True)  # noqa: T201
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await answer(store, json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
