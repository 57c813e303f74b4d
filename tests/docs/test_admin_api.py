"""The tables of the admin API, the metrics and the alerts agree with the code."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import yaml
from pages import ROOT, code, number, table

from genie.admin import api, connections, throttle, views
from genie.admin.http import AdminServer
from genie.admin.models import MAX_BODY
from genie.config import HistorySettings, Settings
from genie.core import LockManager
from genie.observability import stats
from genie.observability.metrics import Metrics
from genie.roles import Leading
from genie.server.app import Server
from genie.server.pipeline import Pipeline
from genie.storage.store import StoreMemory
from support.admin.client import fetch, release

API = "docs/reference/http-api.md"
METRICS = "docs/reference/metrics.md"
MONITORING = "docs/how-to/monitoring.md"


def text() -> str:
    return " ".join((ROOT / API).read_text().split())


def with_history(tmp_path: Path) -> Server:
    """A server with all metrics."""
    server = Server(Settings(history=HistorySettings(dir=str(tmp_path))))
    for namespace in server.namespaces.values():
        namespace.store_memory = StoreMemory(1, 2)
        namespace.pipeline = cast(
            "Pipeline",
            SimpleNamespace(manager=LockManager(), now=0.0, session_count=0, state_bytes=0, store_available=True),
        )
        namespace._role = Leading()
    return server


def test_the_metrics_are_those_of_the_code(tmp_path: Path) -> None:
    exported = {family.name: family.type for family in Metrics(with_history(tmp_path)).collect()}
    assert {code(row["Metric"]): row["Type"] for row in table(METRICS, "Metric", "Type")} == exported


def test_the_labels_are_those_of_the_code(tmp_path: Path) -> None:
    rows = {code(row["Metric"]): row["Labels"] for row in table(METRICS, "Metric", "Type")}
    for family in Metrics(with_history(tmp_path)).collect():
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        assert rows[family.name] == (", ".join(f"`{label}`" for label in labels) or "none")


def test_the_paths_of_the_api_and_their_limits() -> None:
    rows = {code(row["Path"]): row for row in table(API, "Path", "Returns")}
    described = msgspec.json.decode(api.schema())["paths"]
    paths = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    assert set(rows) == paths | {"GET /api/schema"}
    for path, row in rows.items():
        limit = api.LIMITS.get(path.partition(" ")[2])
        if limit is None:
            assert (row["Limit"], row["At most"]) == ("none", "none")
        else:
            assert row["Limit"] == f"{limit.default} {limit.items}"
            assert number(row["At most"]) == limit.maximum


async def test_every_documented_path_exists(tmp_path: Path) -> None:
    server = Server(Settings.from_options(admin_port=0, history_dir=str(tmp_path)))
    admin = AdminServer(server)
    await admin.start()
    try:
        assert admin.address is not None
        for row in table(API, "Path", "200"):
            assert (await fetch(admin.address[1], code(row["Path"]))).status in (200, 503)
        for row in table(API, "Path", "Returns"):
            method, path = code(row["Path"]).split()
            path = path.replace("{name}", "a")
            response = await (release(admin.address[1], b"{}") if method == "POST" else fetch(admin.address[1], path))
            assert response.status in (200, 400, 503), path
    finally:
        await admin.stop()


@pytest.mark.parametrize(
    "statement",
    [
        f"the body is longer than {MAX_BODY:,} bytes",
        f"examines only the {views.MAX_SCANNED_WAITERS:,} requests that have waited longest",
        f"at most {views.MAX_SCANNED_ENTRIES:,} of their queue entries",
        f"the {views.MAX_QUEUES} longest queues",
        f"the first {views.MAX_ROWS} entries of its queue",
        f"all nodes together have {views.MAX_EDGES:,}",
        f"has at most {views.MAX_STEPS:,} steps",
        f"keeps the last {stats.MAX_DEADLOCKS} deadlocks, with at most {stats.MAX_DEADLOCK_STEPS:,} steps",
        f"{stats.MAX_RESOURCES:,} hot resources",
        f"at most {connections.MAX_CONNECTIONS} connections that have sent a request",
        f"at most {connections.MAX_PENDING} connections whose first request is not complete",
        f"{throttle.MAX_WAITING_REQUESTS} pending queries",
        f"`{Settings().admin.host}:{Settings().admin.port}`",
    ],
)
def test_the_documented_limits_are_those_of_the_code(statement: str) -> None:
    assert statement in text()


def test_the_alerts_are_those_of_the_rule_file() -> None:
    groups = yaml.safe_load(Path(ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    assert {code(row["Alert"]) for row in table(MONITORING, "Alert")} == {
        rule["alert"] for group in groups for rule in group["rules"]
    }
