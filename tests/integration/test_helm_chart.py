"""The Helm chart: rendered by helm, validated by the schemas of Kubernetes, and its servers run as processes.

`make deploy-tools` fetches helm and the schemas.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import shutil
import signal
import ssl
import subprocess
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

import genie
from genie.config import Settings
from genie.errors import RequestRejected
from genie.storage.redis.url import REDIS_PORT, SENTINEL_PORT
from support.network.certificates import Certificates
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, running_redis
from support.processes.waiting import until

ROOT = Path(__file__).parents[2]
CHART, TOOLS = ROOT / "deploy/helm/genie", ROOT / "build/tools"
SCHEMAS = sorted((TOOLS / "schemas").glob("*"))
HELM = next((str(path) for path in [TOOLS / "helm", shutil.which("helm")] if path and Path(path).exists()), None)
REQUIRED = {"redis": {"url": "redis://redis:6379/0"}, "auth": {"existingSecret": "genie-token"}}
ALL = {
    "replicas": 3,
    "image": {"digest": "sha256:" + 64 * "a", "pullSecrets": [{"name": "pull"}]},
    "redis": {"existingSecret": "redis", "minReplicas": 1, "fsync": True},
    "auth": {"existingSecret": "tokens", "existingSecretKey": "tokens.toml"},
    "tls": {"existingSecret": "tls", "clientCertificates": True},
    "namespaces": ["orders", "wallets"],
    "extraEnv": [{"name": "GENIE_SLOW_WAIT", "value": "5"}],
    "service": {"annotations": {"a": "b"}},
    "antiAffinity": "hard",
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "history": {"enabled": True, "storageClass": "fast"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "locks", "operator": "Exists"}],
    "priorityClassName": "high",
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "payments"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "tokenSecret": "inspector"},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
}
MINIMAL = {
    "redis": {"url": "redis://redis:6379/0"},
    "auth": {"insecure": True},
    "antiAffinity": "none",
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
}

pytestmark = pytest.mark.skipif(HELM is None or not SCHEMAS, reason="make deploy-tools fetches helm and the schemas")


def helm(*arguments: str, values: dict[str, Any], namespace: str = "locking") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HELM), *arguments, "--namespace", namespace, "--values", "-"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def render(values: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the rendered manifests, by kind and name."""
    return _render(json.dumps(values))


@functools.cache
def _render(values: str, release: str = "prod", namespace: str = "locking") -> dict[tuple[str, str], Any]:
    done = helm("template", release, str(CHART), values=json.loads(values), namespace=namespace)
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document]
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents)
    return found


def the(kind: str, values: dict[str, Any]) -> Any:
    (found,) = (document for (each, _), document in render(values).items() if each == kind)
    return found


def container(values: dict[str, Any]) -> Any:
    (found,) = the("StatefulSet", values)["spec"]["template"]["spec"]["containers"]
    return found


def environment(values: dict[str, Any]) -> dict[str, Any]:
    """Return the variables: their texts, or their sources in other objects."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(values)["env"]}


# -- rendering ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [REQUIRED, ALL, MINIMAL], ids=["required", "all", "minimal"])
@pytest.mark.parametrize("version", SCHEMAS, ids=lambda path: path.name.removesuffix("-local-strict"))
def test_kubernetes_accepts_the_manifests(version: Path, values: dict[str, Any]) -> None:
    definitions = Resource.from_contents(
        json.loads((version / "_definitions.json").read_text()), default_specification=DRAFT7
    )
    registry: Registry[Any] = Registry().with_resource("_definitions.json", definitions)
    for manifest in render(values).values():
        group, _, name = manifest["apiVersion"].rpartition("/")
        if group == "monitoring.coreos.com":
            continue  # no part of Kubernetes
        parts = [manifest["kind"].lower(), *([group.split(".")[0]] if group else []), name]
        schema = json.loads((version / f"{'-'.join(parts)}.json").read_text())
        assert list(jsonschema.Draft7Validator(schema, registry=registry).iter_errors(manifest)) == []


def test_helm_finds_no_defect_in_the_chart() -> None:
    done = helm("lint", "--strict", str(CHART), values=ALL)
    assert done.returncode == 0, done.stdout


def test_each_manifest_is_rendered_when_it_is_enabled() -> None:
    always = {"StatefulSet", "Service"}
    assert {kind for kind, _ in render(MINIMAL)} == always
    assert {kind for kind, _ in render(REQUIRED)} == always | {"PodDisruptionBudget", "NetworkPolicy"}
    assert {kind for kind, _ in render(ALL)} - {kind for kind, _ in render(REQUIRED)} == {
        "ServiceMonitor",
        "PrometheusRule",
        "ConfigMap",
    }


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"auth": {"existingSecret": "t"}}, "redis.url or redis.existingSecret is required"),
        ({**REQUIRED, "redis": {"url": "redis://a", "existingSecret": "b"}}, "not both"),
        ({"redis": {"url": "redis://a"}}, "auth.existingSecret is required"),
        ({**REQUIRED, "tls": {"clientCertificates": True}}, "tls.clientCertificates requires tls.existingSecret"),
        ({**REQUIRED, "replica": 3}, "additional properties 'replica' not allowed"),
        ({**REQUIRED, "replicas": "two"}, "replicas"),
        ({**REQUIRED, "antiAffinity": "firm"}, "antiAffinity"),
        ({**REQUIRED, "redis": {"url": "http://redis"}}, "redis/url"),
        ({**REQUIRED, "namespaces": ["a b"]}, "namespaces/0"),
        ({**REQUIRED, "terminationGracePeriodSeconds": 5}, "terminationGracePeriodSeconds"),
    ],
)
def test_invalid_values_are_errors(values: dict[str, Any], error: str) -> None:
    done = helm("template", "prod", str(CHART), values=values)
    assert done.returncode != 0
    assert error in done.stderr


def test_the_schema_knows_each_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"].keys() == values.keys() | {"global"}
    for name, part in schema["properties"].items():
        if "properties" in part:
            assert part["properties"].keys() == values[name].keys(), name


@pytest.mark.parametrize("values", [REQUIRED, ALL, MINIMAL], ids=["required", "all", "minimal"])
def test_each_variable_is_a_setting(values: dict[str, Any]) -> None:
    names = environment(values).keys() - {"POD_NAME"}
    assert {name.removeprefix("GENIE_").lower() for name in names} <= Settings().options().keys()


def test_a_pod_has_no_privileges_and_no_writable_file_system() -> None:
    pod = the("StatefulSet", REQUIRED)["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert f"USER {user}" in (ROOT / "Dockerfile").read_text()
    assert container(REQUIRED)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["terminationGracePeriodSeconds"] * 1000 > 2 * Settings().drain_timeout_ms
    assert pod["enableServiceLinks"] is False, "Kubernetes would set GENIE_PORT for a service that is called genie"


def test_secrets_are_files_that_the_kubelet_updates() -> None:
    mounts = {mount["name"]: mount for mount in container(ALL)["volumeMounts"]}
    assert all("subPath" not in mount for mount in mounts.values())
    variables = environment(ALL)
    assert variables["GENIE_TOKEN_FILE"] == f"{mounts['auth']['mountPath']}/tokens.toml"
    for name in ("CERT", "KEY", "CA"):
        assert variables[f"GENIE_TLS_{name}"].startswith(f"{mounts['tls']['mountPath']}/")
    assert variables["GENIE_REDIS_URL"] == {"secretKeyRef": {"name": "redis", "key": "url"}}
    assert "redis://" not in json.dumps([*render(ALL).values()])
    assert {container(ALL)[probe]["httpGet"]["scheme"] for probe in ("livenessProbe", "readinessProbe")} == {"HTTPS"}


def test_the_services_select_the_servers() -> None:
    labels = the("StatefulSet", REQUIRED)["spec"]["template"]["metadata"]["labels"]
    manifests = render(REQUIRED)
    clients, peers = manifests["Service", "prod-genie"], manifests["Service", "prod-genie-peers"]
    for service in (clients, peers):
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= {
            port["name"] for port in container(REQUIRED)["ports"]
        }
    assert the("StatefulSet", REQUIRED)["spec"]["serviceName"] == peers["metadata"]["name"]
    assert peers["spec"]["clusterIP"] == "None"
    assert peers["spec"]["publishNotReadyAddresses"] is True
    assert environment(REQUIRED)["GENIE_ADVERTISE"] == "$(POD_NAME).prod-genie-peers.locking.svc.cluster.local:7077"
    assert container(REQUIRED)["env"][0]["name"] == "POD_NAME", "it must precede its use"


def test_the_notes_name_all_servers() -> None:
    done = helm("install", "--dry-run=client", "prod", str(CHART), values=ALL)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    addresses = ",".join(f"prod-genie-{i}.prod-genie-peers.locking.svc.cluster.local:7077" for i in range(3))
    assert f"GENIE_HOST={addresses}\n" in notes
    assert "*.prod-genie-peers.locking.svc.cluster.local" in notes
    assert "WARNING" not in notes


def test_the_monitoring_is_that_of_the_repository() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    assert the("PrometheusRule", ALL)["spec"] == rules
    dashboard = json.loads(the("ConfigMap", ALL)["data"]["genie.json"])
    assert dashboard == json.loads((ROOT / "deploy/grafana/genie.json").read_text())
    monitor = the("ServiceMonitor", ALL)
    peers = render(ALL)["Service", "prod-genie-peers"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= peers["metadata"]["labels"].items()
    clients = render(ALL)["Service", "prod-genie"]
    assert not monitor["spec"]["selector"]["matchLabels"].items() <= clients["metadata"]["labels"].items(), "once each"
    assert peers["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "genie", "the alerts select this job"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "inspector", "key": "token"}
    assert endpoint["honorLabels"] is True, "the namespace of Kubernetes would replace that of Genie"
    assert endpoint["relabelings"] == [{"targetLabel": "deployment", "replacement": "locking/prod"}]


def test_servers_are_spread_over_zones() -> None:
    (constraint,) = the("StatefulSet", ALL)["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "topology.kubernetes.io/zone"
    assert constraint["labelSelector"] == {"matchLabels": the("StatefulSet", ALL)["spec"]["selector"]["matchLabels"]}


def test_the_history_has_a_volume_of_its_own() -> None:
    assert "GENIE_HISTORY_DIR" not in environment(REQUIRED)
    assert "volumeClaimTemplates" not in the("StatefulSet", REQUIRED)["spec"]
    variables = environment(ALL)
    (claim,) = the("StatefulSet", ALL)["spec"]["volumeClaimTemplates"]
    (mount,) = (mount for mount in container(ALL)["volumeMounts"] if mount["name"] == claim["metadata"]["name"])
    assert Path(variables["GENIE_HISTORY_DIR"]).parent == Path(mount["mountPath"])
    assert variables["GENIE_HISTORY_MAX_MB"] == str(Settings().history.max_mb)
    assert float(variables["GENIE_HISTORY_MAX_DAYS"]) == Settings().history.max_days
    assert claim["spec"]["storageClassName"] == "fast"


def test_servers_reach_redis_and_its_sentinels() -> None:
    ports = [port["port"] for rule in the("NetworkPolicy", REQUIRED)["spec"]["egress"] for port in rule["ports"]]
    assert {REDIS_PORT, SENTINEL_PORT} <= set(ports)


def test_servers_reload_a_changed_secret() -> None:
    assert float(environment(REQUIRED)["GENIE_RELOAD_INTERVAL"]) > 0


def test_a_client_cannot_make_a_server_exceed_its_memory_with_locks() -> None:
    assert container(REQUIRED)["resources"]["limits"]["memory"] == "1Gi"
    assert int(environment(REQUIRED)["GENIE_MAX_STATE"]) <= 2**30, "counted bytes are at least the bytes in memory"
    assert environment({**REQUIRED, "maxState": 2**33})["GENIE_MAX_STATE"] == str(2**33)


def test_the_values_of_the_documentation() -> None:
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    values = yaml.safe_load(textwrap.dedent(block))
    manifests = _render(json.dumps(values), release="genie", namespace="default")
    services = re.findall(r"^\| Service `([\w-]+)`", page, re.MULTILINE)
    assert sorted(services) == sorted(name for kind, name in manifests if kind == "Service")
    (pod,) = manifests["StatefulSet", "genie"]["spec"]["template"]["spec"]["containers"]
    (advertised,) = (entry["value"] for entry in pod["env"] if entry["name"] == "GENIE_ADVERTISE")
    assert f"GENIE_HOST={','.join(advertised.replace('$(POD_NAME)', f'genie-{i}') for i in range(2))}\n" in page


# -- the servers as processes -------------------------------------------------------------------------------

TOKEN, NEXT_TOKEN = "a-token-of-the-tests", "another-token-of-the-tests"


class SecretVolume:
    """A mounted Secret, as the kubelet writes it: the files are links into a folder that is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._versions = 0

    def update(self, **files: bytes) -> None:
        """Replace the content. `tls_crt` is the file `tls.crt`."""
        self._versions += 1
        version = self.folder / f"..{self._versions}"
        version.mkdir(parents=True)
        for name, content in files.items():
            file = name.replace("_", ".")
            (version / file).write_bytes(content)
            (version / file).chmod(0o440)
            if not (self.folder / file).is_symlink():
                (self.folder / file).symlink_to(f"..data/{file}")
        (self.folder / "..data_tmp").symlink_to(version.name)
        (self.folder / "..data_tmp").rename(self.folder / "..data")


class Pod(Genie):
    """A server with the command and the environment of the rendered container. The addresses and mounts are local ones."""

    def __init__(self, ordinal: int, values: dict[str, Any], redis_url: str, folder: Path) -> None:
        """`folder` contains the folders `auth` and `tls`, which take the place of the mounts."""
        self.name = f"prod-genie-{ordinal}"
        self.ports = {"GENIE_PORT": free_port(), "GENIE_ADMIN_PORT": free_port()}
        super().__init__(port=self.ports["GENIE_PORT"])
        self.rendered = container(values)
        assert self.rendered["command"] == ["genie", "serve"], "what `spawn` runs"
        replaced = {
            "GENIE_HOST": "127.0.0.1",
            "GENIE_ADMIN_HOST": "127.0.0.1",
            "GENIE_ADVERTISE": f"127.0.0.1:{self.port}",
            "GENIE_REDIS_URL": redis_url,
            **{name: str(port) for name, port in self.ports.items()},
        }
        self.variables = {
            name: text for name, text in environment(values).items() if isinstance(text, str) and name != "POD_NAME"
        } | replaced
        assert self.variables.keys() == environment(values).keys() - {"POD_NAME"}
        for mount in self.rendered["volumeMounts"]:
            for name, text in self.variables.items():
                self.variables[name] = text.replace(mount["mountPath"], str(folder / mount["name"]))

    def spawn(self, environment):  # type: ignore[no-untyped-def]
        others = {name: value for name, value in environment.items() if not name.startswith("GENIE_")}
        return super().spawn(others | self.variables)

    def probe(self, name: str) -> int:
        """Run a probe of the container; return the status of the response, 0 if there is none."""
        request = self.rendered[name]["httpGet"]
        assert request["port"] == "admin"
        scheme = request.get("scheme", "HTTP").lower()
        url = f"{scheme}://127.0.0.1:{self.ports['GENIE_ADMIN_PORT']}{request['path']}"
        unverified = ssl._create_unverified_context()  # noqa: S323 - as the kubelet does
        try:
            with urllib.request.urlopen(  # noqa: S310 - a fixed scheme
                url, timeout=self.rendered[name]["timeoutSeconds"], context=unverified
            ) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def leads(self) -> bool:
        url = f"http://127.0.0.1:{self.ports['GENIE_ADMIN_PORT']}/leaderz"
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    async def until_ready(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while await asyncio.to_thread(self.probe, "readinessProbe") != 200:  # noqa: ASYNC110 - as the kubelet does
                await asyncio.sleep(0.05)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    values = REQUIRED | {"replicas": 3}
    SecretVolume(tmp_path / "auth").update(token=TOKEN.encode())
    with running_redis() as redis:
        redis.create_namespace()
        pods = [Pod(ordinal, values, redis.url, tmp_path) for ordinal in range(values["replicas"])]  # type: ignore[call-overload]
        try:
            for pod in pods:
                pod.start()
            yield pods
        finally:
            for pod in pods:
                pod.kill()


async def test_the_probes_of_leaders_and_followers_succeed(pods: list[Pod]) -> None:
    for pod in pods:
        await pod.until_ready()
        assert pod.probe("livenessProbe") == 200
    assert sum(pod.leads() for pod in pods) == 1


async def test_a_client_that_knows_one_follower_reaches_the_leader(pods: list[Pod]) -> None:
    """So a Service that leads to any server follows the leader."""
    for pod in pods:
        address = pod.address
        async with asyncio.timeout(WAIT_S), genie.connect(*address, token=TOKEN) as client, client.lock("accounts/1"):
            pass


async def test_clients_lock_during_a_rolling_restart(pods: list[Pod]) -> None:
    """No call fails, the locks that are held stay held, and a client waits for less than the lease each time."""
    for pod in pods:
        await pod.until_ready()
    addresses = [f"127.0.0.1:{pod.port}" for pod in pods]
    ended, durations = asyncio.Event(), [0.0]

    async def lock_repeatedly(name: str) -> None:
        loop = asyncio.get_running_loop()
        async with genie.connect(addresses, token=TOKEN) as client:
            while not ended.is_set():
                start = loop.time()
                async with client.lock(name):
                    pass
                durations.append(loop.time() - start)
                await asyncio.sleep(0.005)

    async with (
        asyncio.timeout(WAIT_S),
        genie.connect(addresses, token=TOKEN) as holder,
        holder.lock("held throughout") as held,
    ):
        takeovers = 0
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(lock_repeatedly(f"accounts/{number}"))
            for pod in reversed(pods):  # the order of a StatefulSet
                takeovers += pod.leads()
                count = len(durations)
                pod.send(signal.SIGTERM)
                assert await asyncio.to_thread(pod.wait) == 0
                await asyncio.to_thread(pod.start)
                await pod.until_ready()
                await until(lambda count=count: len(durations) >= count + 16)  # the clients work again
            ended.set()
        assert takeovers
        assert held.held
    longest = max(durations)
    assert longest < float(environment(REQUIRED)["GENIE_LEASE"]), "a leader that stops hands over at once"


async def test_changed_secrets_take_effect(tmp_path: Path) -> None:
    """With TLS and client certificates, the probes succeed, a renewed certificate and a new token are used."""
    values = ALL | {"redis": {"url": "redis://redis", "minReplicas": 0}, "auth": {"existingSecret": "tokens"}}
    values |= {"history": {"enabled": False}, "reloadInterval": 0.2}
    auth, tls = SecretVolume(tmp_path / "auth"), SecretVolume(tmp_path / "tls")
    (tmp_path / "certificates").mkdir()
    certificates = Certificates(tmp_path / "certificates")

    def renew() -> bytes:
        certificate = certificates.issue("server", "127.0.0.1").read_bytes()
        tls.update(tls_crt=certificate, tls_key=certificate, ca_crt=certificates.ca.read_bytes())
        return ssl.PEM_cert_to_DER_cert(certificate[certificate.index(b"-----BEGIN CERT") :].decode())

    async def presented() -> bytes:
        context = certificates.context(certificates.issue("client", "localhost", common_name="payments"))
        _, writer = await asyncio.open_connection(*pod.address, ssl=context)
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return found

    auth.update(token=TOKEN.encode())
    first = renew()
    with running_redis() as redis:
        redis.create_namespace("orders")
        redis.create_namespace("wallets")
        pod = Pod(0, values, redis.url, tmp_path)
        try:
            pod.start()
            async with asyncio.timeout(WAIT_S):
                await pod.until_ready()
                assert pod.probe("livenessProbe") == 200
                assert await presented() == first
                auth.update(token=NEXT_TOKEN.encode())
                second = renew()
                await asyncio.to_thread(pod.until, "access tokens reloaded")
                while await presented() != second:  # noqa: ASYNC110 - the two Secrets change one after the other
                    await asyncio.sleep(0.05)
                shown = certificates.context(certificates.issue("client", "localhost", common_name="payments"))
                with pytest.raises(RequestRejected) as rejected:
                    async with genie.connect(*pod.address, token=TOKEN, ssl=shown) as client, client.lock("a"):
                        pass
                assert rejected.value.code == "unauthorized"
                async with genie.connect(*pod.address, token=NEXT_TOKEN, ssl=shown) as client, client.lock("a"):
                    pass
        finally:
            pod.kill()
