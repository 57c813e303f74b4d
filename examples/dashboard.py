"""Something to look at: a shop's afternoon, for the page of the admin port.

    genie serve &
    python examples/dashboard.py              # then open http://127.0.0.1:7078/

The server is the one at GENIE_HOST and GENIE_PORT, and its page the one at GENIE_ADMIN_HOST and GENIE_ADMIN_PORT.

Some hundred orders hold their own locks, and a few workers lock and release continuously. Beside that it creates what
an operator looks for: a queue for a hot resource, a chain of waiting transfers, a shared lock that blocks writers, and
occasionally a deadlock. It runs until Ctrl-C or SIGTERM, and then releases all its locks.

With `--picture FILE` it starts a server of its own, opens the page in Chromium, and keeps what is seen after a while.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import genie

ORDERS = 240
WORKERS = 8
ACCOUNTS = 6
HOUR = 3600.0
WIDTH, HEIGHT = 1280, 1290


class Shop:
    """The workload. Each method creates one situation."""

    def __init__(self, client: genie.Client, tasks: asyncio.TaskGroup) -> None:
        self.client, self.tasks = client, tasks
        self.held: list[genie.Lock] = []
        """Long-lived locks, released at the end."""
        self.random = random.Random(7)

    async def open(self) -> None:
        """Create all situations."""
        for number in range(ORDERS):
            await self.hold(f"order-{4100 + number}", f"orders/{4100 + number}", genie.shared("prices"))
        for number in range(WORKERS):
            self.tasks.create_task(self.work(number))
        self.tasks.create_task(self.quarrel())
        await self.report()
        await self.chain()
        await self.sale()
        await self.readers()

    async def hold(self, transaction: str, *resources: str | genie.Resource) -> genie.Lock:
        """Take what is free, for long."""
        lock = await self.client.acquire(*resources, transaction=transaction, transaction_timeout=HOUR)
        self.held.append(lock)
        return lock

    async def close(self) -> None:
        """Release what is still held."""
        for lock in self.held:
            with suppress(genie.GenieError):  # it has ended, or no server is reachable
                await lock.release()

    async def wait(self, transaction: str, *resources: str | genie.Resource) -> None:
        """Queue a request that waits; a later request is queued after it."""
        lock = self.client.acquire(*resources, transaction=transaction, queue_timeout=HOUR, transaction_timeout=1)
        self.tasks.create_task(self.ended(lock))
        await asyncio.sleep(0.2)

    async def ended(self, lock: object) -> None:
        """Wait for a lock, and be content with any end."""
        with suppress(genie.LockError):
            await lock  # type: ignore[misc]

    async def work(self, worker: int) -> None:
        """Lock and release all the time, sometimes at the same time as others."""
        for number in itertools.count(1):
            payment = f"payment-{worker}{number:04}"
            accounts = [f"accounts/{each}" for each in self.random.sample(range(ACCOUNTS), 2)]
            async with self.client.lock(*accounts, transaction=payment, queue_timeout=60):
                await asyncio.sleep(self.random.expovariate(1 / 0.02))
            await asyncio.sleep(self.random.expovariate(1 / 0.05))
            if number % 100 == 0:
                with suppress(genie.QueueTimeout):
                    await self.client.acquire("ledger/2026-11", transaction=payment, queue_timeout=0.2)

    async def report(self) -> None:
        """A report holds a shared lock on the ledger; writers wait."""
        await self.hold("month-end-report", genie.shared("ledger/2026-11"), genie.shared("rates"))
        await self.wait("posting-88120", "ledger/2026-11")
        await self.wait("posting-88121", "ledger/2026-11")
        await self.wait("rates-import", "rates")

    async def chain(self) -> None:
        """A chain: each transfer holds an account and waits for that of the previous one."""
        names = [f"transfer-{number}" for number in range(51, 54)]
        for name, account in zip(names, ("a-1871", "a-2205", "a-3310"), strict=True):
            await self.hold(name, f"savings/{account}")
        await self.wait(names[1], "savings/a-1871")
        await self.wait(names[2], "savings/a-2205")
        await self.wait("statement-9", genie.shared("savings/a-3310"), genie.shared("savings/a-2205"))

    async def sale(self) -> None:
        """Many checkouts wait for the same resource."""
        await self.hold("checkout-7001", "stock/lamp-brass")
        for number in range(7002, 7015):
            await self.wait(f"checkout-{number}", "stock/lamp-brass")

    async def readers(self) -> None:
        """Some read, and one that writes waits for all of them."""
        for number in range(1, 4):
            await self.hold(f"search-{number}", genie.shared("catalogue"))
        await self.wait("catalogue-update", "catalogue")

    async def quarrel(self) -> None:
        """Create a deadlock, alternately of three and of four transactions."""
        for turn in itertools.count():
            some = [
                (f"transfer-{910 + 10 * turn + each}", f"accounts/c-{401 + 7 * each}") for each in range(3 + turn % 2)
            ]
            locks = [await self.hold(name, account) for name, account in some]
            for (name, _), (_, account) in zip(some, some[1:] + some[:1], strict=True):
                self.tasks.create_task(
                    self.ended(self.client.acquire(account, transaction=name, transaction_timeout=0.5))
                )
                await asyncio.sleep(0.1)
            for lock in locks:
                await lock.release()
                self.held.remove(lock)
            await asyncio.sleep(60 if turn else 4)


async def play(port: int | None, host: str | None = None) -> None:
    """Play until cancelled, then release all locks. None: the host or the port of the environment."""
    async with genie.connect(host, port=port) as client:
        shop = None
        try:
            async with asyncio.TaskGroup() as tasks:
                shop = Shop(client, tasks)
                await shop.open()
        finally:
            if shop is not None:
                await shop.close()


def page_address(admin_port: int) -> str:
    """Return the address of the page. GENIE_ADMIN_HOST may have a scheme: https://HOST."""
    scheme, _, host = (os.environ.get("GENIE_ADMIN_HOST") or "127.0.0.1").rpartition("://")
    return f"{scheme or 'http'}://{f'[{host}]' if ':' in host else host}:{admin_port}/"


async def play_until_stopped(port: int | None, admin_port: int) -> None:
    """Say what happens and where to look, and play until Ctrl-C or SIGTERM."""
    async with genie.connect(port=port) as client:
        await client.ping()
    playing = asyncio.ensure_future(play(port))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, playing.cancel)
    print(f"{ORDERS} orders hold their locks, {WORKERS} workers lock and release, and some requests wait or deadlock.")
    print(f"Look at {page_address(admin_port)} (the admin port of genie serve). Ctrl-C ends it.", flush=True)
    with suppress(asyncio.CancelledError):
        await playing
    print("All its locks are released.")


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def picture(file: Path, seconds: float, width: int, height: int, *, dark: bool) -> None:
    """Start a server and a browser, and keep what is seen."""
    from selenium import webdriver  # noqa: PLC0415 - only who takes pictures needs it

    port, admin_port = free_port(), free_port()
    environment = os.environ | {
        "GENIE_HOST": "127.0.0.1",
        "GENIE_PORT": str(port),
        "GENIE_ADMIN_HOST": "127.0.0.1",
        "GENIE_ADMIN_PORT": str(admin_port),
        "GENIE_LOG_LEVEL": "error",
    }
    with subprocess.Popen([sys.executable, "-m", "genie.cli", "serve"], env=environment) as server:
        options = webdriver.ChromeOptions()
        for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}"):
            options.add_argument(argument)
        options.binary_location = shutil.which("chromium") or ""
        driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

            until_reached(admin_port)
            driver.get(f"http://127.0.0.1:{admin_port}/")
            with suppress(TimeoutError):
                asyncio.run(asyncio.wait_for(play(port, "127.0.0.1"), seconds))
            driver.save_screenshot(str(file))
        finally:
            driver.quit()
            server.terminate()


def until_reached(port: int) -> None:
    """Wait until the port accepts connections."""
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


def main() -> None:
    """Play, or take a picture."""
    admin_port = os.environ.get("GENIE_ADMIN_PORT") or "7078"
    parser = argparse.ArgumentParser(description="Something to look at on the page of the admin port.")
    parser.add_argument("--port", type=int, help="the server's (GENIE_PORT, else 7077)")
    parser.add_argument(
        "--admin-port", type=int, default=admin_port, help="its admin port, for the link (GENIE_ADMIN_PORT, else 7078)"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="take a picture (PNG) with a server of its own")
    parser.add_argument("--seconds", type=float, default=40, help="after which the picture is taken")
    parser.add_argument("--size", type=int, nargs=2, default=(WIDTH, HEIGHT), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    if options.picture is not None:
        picture(options.picture, options.seconds, *options.size, dark=options.dark)
        return
    try:
        asyncio.run(play_until_stopped(options.port, options.admin_port))
    except* (genie.GenieError, ValueError) as errors:
        sys.exit(f"dashboard: {errors.exceptions[0]} (a server is started by: genie serve)")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
