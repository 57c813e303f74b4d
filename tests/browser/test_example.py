"""examples/dashboard.py produces contention that the page shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.admin.browser import Browser, ask
from support.processes.ports import free_port
from support.processes.servers import running_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "dashboard.py"


def test_the_example_produces_deadlocks_and_waits(browser: Browser) -> None:
    with (
        running_server(admin_port=free_port()) as server,
        subprocess.Popen([sys.executable, str(EXAMPLE), "--port", str(server.port)]) as example,
    ):
        try:
            browser.open(server)
            browser.one(".ring")
            browser.until(lambda: "checkout-7001" in browser.texts("#graph .node.held .name"))
            browser.one("#graph .link.same[data-from]")
            assert ask(server, "api/state")["held"] >= 240
            assert browser.console_messages() == []
        finally:
            example.terminate()
