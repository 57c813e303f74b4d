"""`genie serve` with a configuration file, and SIGHUP: what takes effect, what needs a restart, and broken files."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from support.network.wire import Wire
from support.processes.servers import Genie

FIRST, SECOND = "first-token-0123456", "second-token-012345"


async def authenticated(address: tuple[str, int], token: str) -> Wire:
    client = await Wire.connect(address)
    client.send("hello", token=token)
    await client.expect("welcome")
    return client


def reloaded(genie: Genie, path: Path, text: str) -> dict[str, dict[str, Any]]:
    """Replace the file, send SIGHUP, and return the log lines about settings by their keys."""
    path.write_text(text)
    first = len(genie.log)
    genie.send(signal.SIGHUP)
    genie.until("access token")
    return {line["setting"]: line for line in genie.log[first:] if "setting" in line}


async def test_a_reload_changes_settings_and_names_each_that_needs_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "genie.toml"
    settings = "slow_wait = 0\n"
    path.write_text(f'token = "{FIRST}"\n{settings}')
    genie = Genie(config=path, log_level="info")
    try:
        genie.start()
        address = genie.address
        client = await authenticated(address, FIRST)
        await client.lock("exclusive:a")
        text = f'token = "{SECOND}"\nlog_level = "debug"\n{settings.replace("slow_wait = 0", "slow_wait = 0.05")}'
        lines = reloaded(genie, path, text + "[limits]\nmax_connections = 2\nmax_line = 2048\n")
        assert {key: line["event"] for key, line in lines.items()} == {
            "token": "setting changed",
            "slow_wait": "setting changed",
            "limits.max_connections": "setting changed",
            "limits.max_line": "setting change postponed until restart",
        }, "the variable GENIE_LOG_LEVEL precedes the file"
        assert (lines["slow_wait"]["previous"], lines["slow_wait"]["value"]) == (0, 0.05)
        assert not {FIRST, SECOND} & {str(value) for line in genie.log for value in line.values()}

        await client.request("exclusive:a")
        genie.until("slow wait detected")
        second = await authenticated(address, SECOND)
        await second.lock("exclusive:b")
        third = await Wire.connect(address)
        assert (await third.expect("error"))["message"].startswith("too many connections")

        path.write_text(text + "[limits]\nmax_conections = 3\nmax_line = 1\n")
        genie.send(signal.SIGHUP)
        failed = genie.until("configuration reload failed")
        assert "limits.max_conections: unknown key; did you mean limits.max_connections?" in failed["reason"]
        assert "limits.max_line: a whole number" in failed["reason"]
        path.write_text(text.replace(SECOND, "short"))
        genie.send(signal.SIGHUP)
        failed = genie.until("configuration reload failed")
        assert failed["reason"].startswith(f"token in {path} must have")
        path.write_text(settings)  # without a token, every client would have access
        genie.send(signal.SIGHUP)
        assert genie.until("setting change postponed")["setting"] == "token"
        await second.lock("exclusive:c")
    finally:
        genie.kill()


async def test_the_log_level_changes_at_run_time(tmp_path: Path) -> None:
    path = tmp_path / "genie.toml"
    path.write_text('log_level = "info"\n')
    genie = Genie(config=path)
    try:
        genie.start()
        path.write_text('log_level = "debug"\n')
        genie.send(signal.SIGHUP)
        changed = genie.until("setting changed")
        assert (changed["setting"], changed["value"]) == ("log_level", "debug")
        await (await Wire.connect(genie.address)).close()
        assert genie.until("connection")["level"] == "debug"
        path.write_text('log_level = "debug"\n')
        genie.send(signal.SIGHUP)
        genie.until("configuration reloaded without changes")
    finally:
        genie.kill()
