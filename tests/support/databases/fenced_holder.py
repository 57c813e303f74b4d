"""A process that locks account 1, reads it, waits for a line on stdin and then writes, whatever has become of its lock.

    python -m support.databases.fenced_holder PORT KIND URL

It prints `read BALANCE` and then `written` or the name of the error.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import genie
from support.databases.fenced_accounts import Accounts
from support.processes.servers import WAIT_S


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(port: int, kind: str, url: str) -> None:
    accounts = Accounts(kind, url)
    async with genie.connect("127.0.0.1", port) as client:
        lock = await client.acquire("accounts/1", transaction_timeout=WAIT_S)
        balance = await accounts.read(lock.fence)
        with suppress(genie.LockLost):
            await lock.extend(0.01)  # times out while the process is stopped, if not before
        say(f"read {balance}")
        await asyncio.to_thread(sys.stdin.readline)
        try:
            await accounts.write(lock.fence, balance - 10)
            say("written")
        except genie.StaleFence as error:
            say(type(error).__name__)
    await accounts.engine.dispose()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
