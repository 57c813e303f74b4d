"""The dashboard and the alerts use metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client.exposition import generate_latest

from genie.config import Settings
from genie.observability.metrics import Metrics
from genie.server.app import Server
from genie.storage.store import StoreMemory
from genie.version import VERSION

DEPLOY = Path(__file__).parents[2] / "deploy"
OF_PROMETHEUS = {"up"}
OF_TLS = {"genie_certificate_expiry_timestamp_seconds"}
"""The metrics that only a server with a certificate has."""


def samples() -> list[str]:
    server = Server(Settings())
    for namespace in server.namespaces.values():
        namespace.store_memory = StoreMemory(1, 2)
    text = generate_latest(Metrics(server)).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def scraped() -> set[str]:
    """The names of all samples that a server gives."""
    return {re.split(r"[ {]", line)[0] for line in samples()}


@pytest.fixture(scope="module")
def namespace_metrics() -> set[str]:
    """Those of them that have the label."""
    return {line.partition("{")[0] for line in samples() if 'namespace="' in line}


def dashboard() -> dict[str, Any]:
    return msgspec.json.decode((DEPLOY / "grafana/genie.json").read_bytes())


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metric_names(expression: str) -> set[str]:
    """The metrics that an expression names: words that are no functions, no labels, no values of them."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|without|on) \([^)]*\)", "", expression)
    return set(re.findall(r"\b[a-z_]+\b(?!\s*\()", bare)) - {"by", "and", "or", "unless"}


def test_metric_names_of_an_expression() -> None:
    said = (
        'histogram_quantile(0.9, sum by (le) (rate(a_bucket{job="genie_x"}[5m]))) > 1 and time() - b == 0 or absent(c)'
    )
    assert metric_names(said) == {"a_bucket", "b", "c"}


def test_the_dashboard_uses_existing_metrics(scraped: set[str]) -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            names = metric_names(target["expr"])
            assert names, target
            assert names <= scraped, (panel["title"], names - scraped)


def test_the_dashboard_filters_by_namespace(namespace_metrics: set[str]) -> None:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            for name, labels in re.findall(r"\b([a-z_]+)\{([^}]*)\}", target["expr"]):
                assert ('namespace=~"$namespace"' in labels) is (name in namespace_metrics), target["expr"]


def test_no_alert_aggregates_over_deployments_or_namespaces(namespace_metrics: set[str]) -> None:
    """One namespace must not hide what is wrong in another one, and the summary says which it is."""
    for alert in alerts():
        for labels, metric in re.findall(r"by \(([^)]*)\)\D*?\(?((?:genie|up)\w*)", alert["expr"]):
            assert "deployment" in labels, alert
            assert "namespace" in labels or metric not in namespace_metrics, alert
        assert "$labels.deployment" in alert["annotations"]["summary"]
        if metric_names(alert["expr"]) & namespace_metrics:
            assert "$labels.namespace" in alert["annotations"]["summary"]


def test_no_target_label_hides_the_namespace() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert job["honor_labels"] is True
    assert "deployment" in job["static_configs"][0]["labels"]


def test_panels_do_not_overlap() -> None:
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_defines_the_variables_that_it_uses() -> None:
    board = dashboard()
    names = {variable["name"] for variable in board["templating"]["list"]}
    text = msgspec.json.encode(board["panels"]).decode()
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
    assert used == names


def test_every_alert_uses_existing_metrics_and_has_a_description(scraped: set[str]) -> None:
    assert len({alert["alert"] for alert in alerts()}) == len(alerts())
    for alert in alerts():
        names = metric_names(alert["expr"])
        assert names, alert
        assert names <= scraped | OF_PROMETHEUS | OF_TLS, (alert["alert"], names - scraped)
        assert alert["annotations"]["summary"]
        assert re.fullmatch(r"\d+[sm]", alert["for"]), "one bad moment wakes nobody"
        assert alert["labels"]["severity"] in {"warning", "critical"}


def test_the_example_scrapes_the_admin_port_and_loads_the_alerts() -> None:
    example = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (job,) = example["scrape_configs"]
    assert job["job_name"] == "genie"
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{Settings().admin.port}"]
    for name in example["rule_files"]:
        assert (DEPLOY / "prometheus" / name).is_file()


def test_the_chart_installs_this_version() -> None:
    assert yaml.safe_load((DEPLOY / "helm/genie/Chart.yaml").read_text())["appVersion"] == VERSION
