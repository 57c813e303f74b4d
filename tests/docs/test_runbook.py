"""The runbook has an entry for each alert, and its commands run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from pages import ROOT, blocks, code, prose, read, table

from genie.cli import main
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, running_redis

PAGE = "docs/how-to/runbook.md"
PARTS = ["Meaning", "Look", "Do", "Over"]
OTHERS = ("appendfsync", "docker", "genie ", "info ", "kubectl", "systemctl")
"""Phrases that begin so are not messages of Genie."""
SITE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]


def alerts() -> dict[str, dict[str, str]]:
    """The annotations of each alert."""
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["annotations"] for group in groups for rule in group["rules"]}


def entries() -> dict[str, list[str]]:
    """The lines below each heading, by the text of the heading."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in prose(PAGE):
        if line.startswith("#"):
            lines = found[line.lstrip("# ")] = []
        lines.append(line)
    return found


def test_each_alert_has_an_entry_to_which_it_points_and_a_row_in_the_overview() -> None:
    named = [heading for heading in entries() if heading.startswith("Genie")]
    assert named == list(alerts())
    assert [code(row["Alert"]) for row in table("docs/how-to/monitoring.md", "Alert")] == named
    for alert, notes in alerts().items():
        assert notes["runbook_url"] == f"{SITE}how-to/runbook.html#{alert.lower()}"


def test_each_entry_says_what_the_alert_means_where_to_look_what_to_do_and_when_it_is_over() -> None:
    for heading, lines in entries().items():
        if heading.startswith("Genie"):
            assert re.findall(r"^\*\*(\w+)\.\*\*", "\n".join(lines), re.MULTILINE) == PARTS, heading


def test_the_alerts_panels_and_log_events_that_the_page_names_exist() -> None:
    text = "\n".join(read(PAGE))
    assert set(re.findall(r"\bGenie[A-Z]\w+", text)) <= set(alerts())
    dashboard = (ROOT / "deploy/grafana/genie.json").read_text()
    for panel in re.findall(r"[Pp]anel\s+\*([^*]+)\*", text):
        assert f'"title": "{panel}"' in dashboard, panel
    sources = "\n".join(path.read_text() for path in (ROOT / "genie").rglob("*.py"))
    phrases = set(re.findall(r"`([a-z]+ [a-z, ]+)`", re.sub(r"\s+", " ", text)))
    messages = {phrase for phrase in phrases if not phrase.startswith(OTHERS)}
    assert len(messages) > 10
    for message in messages:
        assert message in sources, message


def test_the_commands_within_sentences_have_these_options() -> None:
    text = re.sub(r"\s+", " ", "\n".join(prose(PAGE)))
    commands = {found for found in re.findall(r"`genie ([^`]+)`", text) if not found.startswith("serve")}
    assert commands
    for line in commands:
        command: click.Command = main
        words = shlex.split(line)
        while isinstance(command, click.Group):
            following = command.get_command(click.Context(command), words.pop(0))
            assert following is not None, line
            command = following
        with command.make_context("genie", ["1" if word == "ID" else word for word in words]):
            pass


def test_the_variables_of_the_page_are_no_settings_of_a_server() -> None:
    """`genie serve` in the same shell would take them for its own."""
    settings = next(block for block in blocks(PAGE) if block.language == "sh")
    assert "export" not in settings.text
    assert "GENIE_" not in settings.text


@pytest.mark.server
async def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    commands = [block for block in blocks(PAGE) if block.language == "sh"]
    settings, *commands = commands
    admin_port = free_port()
    with running_redis() as redis:
        redis.create_namespace("orders")
        server = Genie(redis, namespace="orders", admin_port=admin_port)
        server.start()
        wire = await Wire.connect(server.address)
        await wire.lock("exclusive:a", transactionTimeout=600_000)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        values = settings.text
        for written, real in (
            ("locks-1:7077,locks-2:7077", f"127.0.0.1:{server.port}"),
            ("ADMIN_HOST=locks-1 ADMIN_PORT=7078", f"ADMIN_HOST=127.0.0.1 ADMIN_PORT={admin_port}"),
            ("redis://redis-1:6379/0", redis.url),
        ):
            assert written in values
            values = values.replace(written, real)
        for block in commands:
            done = subprocess.run(  # noqa: ASYNC221
                ["bash", "-euo", "pipefail", "-c", values + block.text],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
            assert done.returncode == 0, f"{block}: {done.stderr}"
            assert done.stdout.strip(), block
            assert "ERR " not in done.stdout, f"{block}: {done.stdout}"  # redis-cli exits with 0
        await wire.close()
        server.kill()
