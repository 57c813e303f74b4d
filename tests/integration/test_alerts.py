"""The alert rules, in a real Prometheus that scrapes real servers, and over hours of written samples with promtool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, Redis, running_redis

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yml"
EXAMPLE = RULES.with_name("prometheus.yml")

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="apt install prometheus installs prometheus and promtool",
)


# -- samples over hours -------------------------------------------------------------------------------------

ORDERS = {"deployment": "a", "namespace": "orders"}


def series(text: str, values: str) -> dict[str, str]:
    return {"series": text, "values": values}


def of_orders(metric: str, instance: str, values: str) -> dict[str, str]:
    return series(f'{metric}{{deployment="a", namespace="orders", instance="{instance}"}}', values)


def leader(deployment: str, namespace: str, instance: str, values: str) -> dict[str, str]:
    labels = f'deployment="{deployment}", namespace="{namespace}", instance="{instance}"'
    return series(f"genie_leader{{{labels}}}", values)


def up(deployment: str, instance: str, values: str) -> dict[str, str]:
    return series(f'up{{job="genie", deployment="{deployment}", instance="{instance}"}}', values)


Samples = list[dict[str, str]]


def check(tmp_path: Path, at: str, samples: Samples, *expected: str, query: str = "") -> None:
    """Check that exactly the expected alerts, written as labels, are raised at a time. A sample is taken every minute."""
    names = [f'ALERTS{{alertstate="firing", {labels}}}' for labels in expected]
    compared = {
        "expr": f'ALERTS{{alertstate="firing", {query}}}',
        "eval_time": at,
        "exp_samples": [{"labels": name, "value": 1} for name in names],
    }
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": samples, "promql_expr_test": [compared]}],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def alert(name: str, severity: str, **labels: str) -> str:
    return ", ".join(f'{key}="{value}"' for key, value in {"alertname": name, "severity": severity, **labels}.items())


NO_LEADER = 'alertname="GenieNoLeader"'


def test_a_deployment_whose_servers_are_gone_has_no_leader_while_another_is_scraped(tmp_path: Path) -> None:
    samples = [
        *(up("a", name, "1x5 _x20") for name in ("a1", "a2")),
        leader("a", "orders", "a1", "1x5 _x20"),
        leader("a", "orders", "a2", "0x5 _x20"),
        up("b", "b1", "1x25"),
        leader("b", "orders", "b1", "1x25"),
    ]
    expected = alert("GenieNoLeader", "critical", deployment="a", namespace="orders")
    check(tmp_path, "15m", samples, expected, query=NO_LEADER)


def test_a_deployment_that_never_responded_has_no_leader(tmp_path: Path) -> None:
    samples = [up("a", "a1", "0x25"), up("b", "b1", "1x25"), leader("b", "orders", "b1", "1x25")]
    check(tmp_path, "15m", samples, alert("GenieNoLeader", "critical", deployment="a"), query=NO_LEADER)


def test_without_any_target_there_is_no_leader(tmp_path: Path) -> None:
    check(tmp_path, "15m", [], alert("GenieNoLeader", "critical", job="genie"))


def test_a_led_namespace_hides_no_other_one(tmp_path: Path) -> None:
    samples = [
        up("a", "a1", "1x25"),
        leader("a", "orders", "a1", "1x25"),
        leader("a", "wallets", "a1", "0x25"),
        up("b", "b1", "1x25"),
        leader("b", "wallets", "b1", "1x25"),
    ]
    check(tmp_path, "15m", samples, alert("GenieNoLeader", "critical", deployment="a", namespace="wallets"))


def test_a_change_of_the_leader_raises_nothing(tmp_path: Path) -> None:
    samples = [
        *(up("a", name, "1x25") for name in ("a1", "a2")),
        leader("a", "orders", "a1", "1x10 0x15"),
        leader("a", "orders", "a2", "0x10 1x15"),
    ]
    check(tmp_path, "20m", samples)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("1x25", "0x25", [alert("GenieServerWithoutStore", "warning", **ORDERS, instance="a2")]),
        ("0x25", "0x25", [alert("GenieStoreUnavailable", "critical", **ORDERS)]),
        ("1x25", "1x25", []),
    ],
)
def test_a_store_that_one_server_does_not_reach_is_a_warning(
    tmp_path: Path, first: str, second: str, expected: list[str]
) -> None:
    available = [of_orders("genie_store_available", name, values) for name, values in (("a1", first), ("a2", second))]
    samples = [up("a", "a1", "1x25"), leader("a", "orders", "a1", "1x25"), *available]
    check(tmp_path, "15m", samples, *expected)


@pytest.mark.parametrize(
    ("errors", "is_raised"),
    [
        ("0x20 7x60", False),  # one interruption
        ("0x13 3 7x60", False),  # one that is in two intervals
        ("0x13 1x5 2x5 3x5 4x5 5x60", True),
    ],
)
def test_store_errors_that_come_once_raise_nothing(tmp_path: Path, errors: str, is_raised: bool) -> None:
    samples = [of_orders("genie_store_errors_total", "a1", errors)]
    expected = [alert("GenieStoreErrors", "warning", **ORDERS, instance="a1")] if is_raised else []
    check(tmp_path, "35m", samples, *expected, query='alertname="GenieStoreErrors"')


@pytest.mark.parametrize(("used", "is_raised"), [("79x25", False), ("81x25", True)])
def test_a_store_is_reported_before_it_is_full(tmp_path: Path, used: str, is_raised: bool) -> None:
    samples = [
        of_orders("genie_store_memory_bytes", "a1", used),
        of_orders("genie_store_memory_limit_bytes", "a1", "100x25"),
    ]
    expected = [alert("GenieStoreNearlyFull", "warning", **ORDERS)] if is_raised else []
    check(tmp_path, "20m", samples, *expected, query='alertname="GenieStoreNearlyFull"')


@pytest.mark.parametrize(("used", "is_raised"), [("79x25", False), ("81x25", True)])
def test_the_state_is_reported_before_it_is_full(tmp_path: Path, used: str, is_raised: bool) -> None:
    samples = [of_orders("genie_state_bytes", "a1", used), of_orders("genie_state_limit_bytes", "a1", "100x25")]
    expected = [alert("GenieStateNearlyFull", "warning", **ORDERS)] if is_raised else []
    check(tmp_path, "20m", samples, *expected, query='alertname="GenieStateNearlyFull"')


# -- real servers -------------------------------------------------------------------------------------------


class Prometheus:
    """A Prometheus that scrapes and evaluates every second, with the shipped rules, which wait for nothing."""

    def __init__(self, folder: Path, targets: dict[str, int]) -> None:
        self.port = free_port()
        rules = yaml.safe_load(RULES.read_text())
        for rule in rules["groups"][0]["rules"]:
            rule["for"] = "0s"
        (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
        settings = yaml.safe_load(EXAMPLE.read_text())
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        # As in Kubernetes, each target has a label with the name of its namespace of Kubernetes.
        settings["scrape_configs"][0]["static_configs"] = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"deployment": name, "namespace": "of-kubernetes"}}
            for name, port in targets.items()
        ]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        options = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder / "data",
            "web.listen-address": f"127.0.0.1:{self.port}",
            "log.level": "error",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self._process = subprocess.Popen(["prometheus", *arguments], env={"PATH": os.environ["PATH"]})

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=WAIT_S) as response:
                found: list[dict[str, Any]] = json.load(response)["data"]["result"]
        except OSError:  # it starts
            return []
        return found

    def until(self, expression: str, *names: str, expected: set[tuple[str, ...]]) -> None:
        """Wait until a query returns series with exactly these values of the labels `names`."""
        end, found = time.monotonic() + WAIT_S, set()
        while time.monotonic() < end:
            assert self._process.poll() is None
            found = {tuple(each["metric"].get(name, "") for name in names) for each in self.query(expression)}
            if found == expected:
                return
            time.sleep(0.1)
        raise AssertionError(f"{expression}: {found}")


def forbid(redis: Redis, namespace: str) -> str:
    """Create a user of Redis that may use the keys of one namespace only, and return the URL with this user."""
    redis.call("ACL", "SETUSER", "genie", "on", ">secret", f"~{{{namespace}}}:*", "+@all")
    return f"redis://genie:secret@127.0.0.1:{redis.port}/0"


def test_alerts_tell_deployments_and_namespaces_apart(tmp_path: Path) -> None:
    """Deployment `a` dies. Deployment `b` leads `orders`, but may not use the keys of `wallets`."""
    with running_redis() as redis_a, running_redis("--maxmemory", "100mb") as redis_b:
        for redis in (redis_a, redis_b):
            redis.create_namespace("orders")
            redis.create_namespace("wallets")
        a = Genie(redis_a, namespaces="orders,wallets", admin_port=free_port())
        b = Genie(redis_b, namespaces="orders,wallets", admin_port=free_port())
        b.redis_url = forbid(redis_b, "orders")
        prometheus = None
        try:
            a.start()
            b.start()
            prometheus = Prometheus(
                tmp_path, {"a": int(str(a.settings["admin_port"])), "b": int(str(b.settings["admin_port"]))}
            )
            led = {("a", "orders"), ("a", "wallets"), ("b", "orders")}
            prometheus.until("genie_leader == 1", "deployment", "namespace", expected=led)
            prometheus.until("genie_store_memory_bytes > 0", "deployment", "namespace", expected=led)
            limits = {("b", "orders", "")}
            prometheus.until(
                "genie_store_memory_limit_bytes == 104857600", "deployment", "namespace", "", expected=limits
            )
            firing = 'ALERTS{alertstate="firing", severity="critical"}'
            without_store = {("GenieNoLeader", "b", "wallets"), ("GenieStoreUnavailable", "b", "wallets")}
            prometheus.until(firing, "alertname", "deployment", "namespace", expected=without_store)
            a.kill()
            gone = {("GenieNoLeader", "a", "orders"), ("GenieNoLeader", "a", "wallets")}
            prometheus.until(firing, "alertname", "deployment", "namespace", expected=without_store | gone)
        finally:
            a.kill()
            b.kill()
            if prometheus is not None:
                prometheus.stop()
