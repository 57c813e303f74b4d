"""A simulated shop that generates load to look at on the page of the admin port.

    genie serve &
    python examples/dashboard.py              # then open http://127.0.0.1:7078/

The server is the one at GENIE_HOST and GENIE_PORT, and its page the one at GENIE_ADMIN_HOST and GENIE_ADMIN_PORT.

Some hundred orders hold their own locks, and a few workers lock and release continuously. Beside that it creates what
an operator looks for: a queue for a hot resource, a chain of waiting transfers, a shared lock that blocks writers, and
occasionally a deadlock. It runs until Ctrl-C or SIGTERM, and then releases all its locks.

With `--picture FILE` it starts a server of its own, opens the page in Chromium, and saves a screenshot after a while.
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
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import genie

ORDERS = 240
WORKERS = 8
ACCOUNTS = 6
HOUR_S = 3600.0
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
        self.tasks.create_task(self.create_deadlocks())
        await self.block_writers()
        await self.create_wait_chain()
        await self.create_hot_resource()
        await self.block_writer_by_readers()

    async def hold(self, transaction: str, *resources: str) -> genie.Lock:
        """Lock free resources for a long time."""
        lock = await self.client.acquire(*resources, transaction=transaction, transaction_timeout=HOUR_S)
        self.held.append(lock)
        return lock

    async def close(self) -> None:
        """Release what is still held."""
        for lock in self.held:
            with suppress(genie.GenieError):  # it has ended, or no server is reachable
                await lock.release()

    async def wait(self, transaction: str, *resources: str) -> None:
        """Queue a request in the background; return when it is in the queue."""
        lock = self.client.acquire(*resources, transaction=transaction, queue_timeout=HOUR_S, transaction_timeout=1)
        self.tasks.create_task(self.ignore_outcome(lock))
        await asyncio.sleep(0.2)

    async def ignore_outcome(self, lock: Awaitable[genie.Lock]) -> None:
        """Wait until a request is granted or has failed."""
        with suppress(genie.LockError):
            await lock

    async def work(self, worker: int) -> None:
        """Lock and release random accounts continuously, with occasional contention."""
        for number in itertools.count(1):
            payment = f"payment-{worker}{number:04}"
            accounts = [f"accounts/{account}" for account in self.random.sample(range(ACCOUNTS), 2)]
            async with self.client.lock(*accounts, transaction=payment, queue_timeout=60):
                await asyncio.sleep(self.random.expovariate(1 / 0.02))
            await asyncio.sleep(self.random.expovariate(1 / 0.05))
            if number % 100 == 0:
                with suppress(genie.QueueTimeout):
                    await self.client.acquire("ledger/2026-11", transaction=payment, queue_timeout=0.2)

    async def block_writers(self) -> None:
        """Let a report hold a shared lock on the ledger, for which writers wait."""
        await self.hold("month-end-report", genie.shared("ledger/2026-11"), genie.shared("rates"))
        await self.wait("posting-88120", "ledger/2026-11")
        await self.wait("posting-88121", "ledger/2026-11")
        await self.wait("rates-import", "rates")

    async def create_wait_chain(self) -> None:
        """Let each transfer hold an account and wait for that of the previous transfer."""
        names = [f"transfer-{number}" for number in range(51, 54)]
        for name, account in zip(names, ("a-1871", "a-2205", "a-3310"), strict=True):
            await self.hold(name, f"savings/{account}")
        await self.wait(names[1], "savings/a-1871")
        await self.wait(names[2], "savings/a-2205")
        await self.wait("statement-9", genie.shared("savings/a-3310"), genie.shared("savings/a-2205"))

    async def create_hot_resource(self) -> None:
        """Let many checkouts wait for the same resource."""
        await self.hold("checkout-7001", "stock/lamp-brass")
        for number in range(7002, 7015):
            await self.wait(f"checkout-{number}", "stock/lamp-brass")

    async def block_writer_by_readers(self) -> None:
        """Let several readers hold a shared lock, for all of which one writer waits."""
        for number in range(1, 4):
            await self.hold(f"search-{number}", genie.shared("catalogue"))
        await self.wait("catalogue-update", "catalogue")

    async def create_deadlocks(self) -> None:
        """Create a deadlock every minute, alternately of three and of four transactions."""
        for number in itertools.count():
            transfers = [
                (f"transfer-{910 + 10 * number + member}", f"accounts/c-{401 + 7 * member}")
                for member in range(3 + number % 2)
            ]
            locks = [await self.hold(name, account) for name, account in transfers]
            for (name, _), (_, account) in zip(transfers, transfers[1:] + transfers[:1], strict=True):
                lock = self.client.acquire(account, transaction=name, transaction_timeout=0.5)
                self.tasks.create_task(self.ignore_outcome(lock))
                await asyncio.sleep(0.1)
            for held in locks:
                await held.release()
                self.held.remove(held)
            await asyncio.sleep(60 if number else 4)


async def simulate(port: int | None, host: str | None = None) -> None:
    """Run the shop until cancelled, then release all locks. None: the host or the port of the environment."""
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


async def simulate_until_stopped(port: int | None, admin_port: int) -> None:
    """Print the address of the page, and run the shop until Ctrl-C or SIGTERM."""
    async with genie.connect(port=port, connect_timeout=1) as client:
        await client.ping()
    simulation = asyncio.ensure_future(simulate(port))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, simulation.cancel)
    print(f"{ORDERS} orders hold their locks, {WORKERS} workers lock and release, and some requests wait or deadlock.")
    print(f"Look at {page_address(admin_port)} (the admin port of genie serve). Ctrl-C ends it.", flush=True)
    with suppress(asyncio.CancelledError):
        await simulation
    print("All its locks are released.")


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def take_picture(file: Path, seconds: float, width: int, height: int, *, dark: bool) -> None:
    """Start a server, a browser and the shop, and save a screenshot of the page after `seconds`."""
    from selenium import webdriver  # noqa: PLC0415 - an optional dependency

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

            wait_for_listener(admin_port)
            driver.get(f"http://127.0.0.1:{admin_port}/")
            asyncio.run(simulate_until(port, seconds, lambda: driver.save_screenshot(str(file))))
        finally:
            driver.quit()
            server.terminate()


async def simulate_until(port: int, seconds: float, take_screenshot: Callable[[], object]) -> None:
    """Run the shop, and take the screenshot after `seconds`, before the shop releases its locks."""
    shop = asyncio.create_task(simulate(port, "127.0.0.1"))
    done, _ = await asyncio.wait([shop], timeout=seconds)
    if not done:
        await asyncio.to_thread(take_screenshot)
        shop.cancel()
    with suppress(asyncio.CancelledError):
        await shop


def wait_for_listener(port: int) -> None:
    """Wait until the port accepts connections."""
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


def main() -> None:
    """Run the shop, or take a picture of the page."""
    admin_port = os.environ.get("GENIE_ADMIN_PORT") or "7078"
    parser = argparse.ArgumentParser(description="Generate load to look at on the page of the admin port.")
    parser.add_argument("--port", type=int, help="port of the server (GENIE_PORT, else 7077)")
    parser.add_argument(
        "--admin-port", type=int, default=admin_port, help="its admin port, for the link (GENIE_ADMIN_PORT, else 7078)"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="save a screenshot (PNG), using its own server")
    parser.add_argument("--seconds", type=float, default=40, help="time before the screenshot (40)")
    parser.add_argument("--size", type=int, nargs=2, default=(WIDTH, HEIGHT), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--dark", action="store_true", help="use the dark color scheme")
    options = parser.parse_args()
    if options.picture is not None:
        take_picture(options.picture, options.seconds, *options.size, dark=options.dark)
        return
    try:
        asyncio.run(simulate_until_stopped(options.port, options.admin_port))
    except* (genie.GenieError, ValueError) as errors:
        sys.exit(f"dashboard: {errors.exceptions[0]} (start a server with: genie serve)")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
