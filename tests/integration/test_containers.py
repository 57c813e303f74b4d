"""Checks of the image and of the compose file that need no container engine.

The wheel of the image is built and installed, and the commands of the image are run from it: with the environment of
the image, as an unprivileged user, without a writable folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from genie.config import Settings
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, Redis, running_redis

ROOT = Path(__file__).parents[2]
UNPRIVILEGED = 65534
COMPILED = "GENIE_TESTS_SOAK" in os.environ and shutil.which("cc") is not None
LOOPBACK = "127.0.0.1"
VALKEY = next(
    (
        str(path)
        for path in [ROOT / "build/tools/valkey-server", shutil.which("valkey-server")]
        if path and Path(path).exists()
    ),
    None,
)


class Valkey(Redis):
    """A valkey-server with these options. `appendfsync everysec`: what was written survives a kill of the process."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        super().__init__(folder, *options)

    def spawn(self) -> None:
        place = ["--port", str(self.port), "--bind", LOOPBACK, "--dir", str(self.folder)]
        self.process = subprocess.Popen([str(VALKEY), *place, *self.options], stdout=subprocess.DEVNULL)


# -- the files as data ----------------------------------------------------------------------------------------


def dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments, in order."""
    text = re.sub(r"\\\n", "", (ROOT / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines()]
    found = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in found]


def final_stage() -> dict[str, list[str]]:
    """Return the arguments of the instructions of the last stage, the image, by instruction."""
    instructions = dockerfile()
    start = max(i for i, (word, _) in enumerate(instructions) if word == "FROM")
    stage: dict[str, list[str]] = {}
    for word, rest in instructions[start:]:
        stage.setdefault(word, []).append(rest)
    return stage


def argument_of(word: str) -> str:
    (rest,) = final_stage()[word]
    return rest


def exec_form(text: str) -> list[str]:
    """Parse a command in exec form: without a shell, so that it receives the signals."""
    command = json.loads(text)
    assert isinstance(command, list)
    assert all(isinstance(part, str) for part in command)
    return command


def image_environment() -> dict[str, str]:
    pairs = (pair.split("=", 1) for rest in final_stage()["ENV"] for pair in shlex.split(rest))
    return dict(pairs)


def compose() -> dict[str, Any]:
    """Return the compose file."""
    found = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(found, dict)
    return found


# -- the image ------------------------------------------------------------------------------------------------


def test_copied_files_exist_and_are_not_ignored() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and not line.startswith("#")]
    sources = []
    for word, rest in dockerfile():
        if word in ("COPY", "ADD") and not rest.startswith("--from="):
            sources += rest.split()[:-1]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        ignored = False
        for rule in rules:
            if fnmatch(source, rule.removeprefix("!")):
                ignored = not rule.startswith("!")
        assert not ignored, source


def test_copied_stages_exist() -> None:
    stages = [rest.rpartition(" AS ")[2] for word, rest in dockerfile() if word == "FROM" and " AS " in rest]
    assert {rest.split()[0] for word, rest in dockerfile() if rest.startswith("--from=")} == {f"--from={stages[0]}"}


def test_the_image_needs_neither_root_nor_a_writable_folder() -> None:
    user, group = map(int, argument_of("USER").split(":"))
    assert user
    assert group
    assert "VOLUME" not in final_stage()
    assert "RUN" not in final_stage(), "everything is built in the previous stage"
    assert image_environment()["PYTHONDONTWRITEBYTECODE"] == "1"


def test_the_image_starts_and_stops_the_server() -> None:
    assert argument_of("STOPSIGNAL") == "SIGTERM"
    assert exec_form(argument_of("ENTRYPOINT")) == ["genie"]
    assert exec_form(argument_of("CMD")) == ["serve"]
    environment = image_environment()
    assert environment["GENIE_HOST"] == "0.0.0.0"  # noqa: S104 - in the container; the compose file limits what is published
    assert environment["GENIE_ADMIN_HOST"] == environment["GENIE_HOST"]
    assert argument_of("EXPOSE").split() == [environment["GENIE_PORT"], environment["GENIE_ADMIN_PORT"]]


def test_the_image_has_a_supported_python() -> None:
    bases = [rest.split()[0] for word, rest in dockerfile() if word == "FROM"]
    assert set(bases) == {"${BASE}"}, "the stages must have the same Python"
    (default,) = (rest for word, rest in dockerfile() if word == "ARG")
    (version,) = re.fullmatch(r"BASE=python:3\.(\d+)-slim", default).groups()  # type: ignore[union-attr]
    (needed,) = re.findall(r'^requires-python = ">=3\.(\d+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert int(version) >= int(needed)


def build_stage_commands() -> list[str]:
    """Return the arguments of the RUN instructions of the build stage, in order."""
    return [rest for word, rest in dockerfile() if word == "RUN"]


def test_the_wheel_is_compiled_in_the_build_stage() -> None:
    first, wheel, *_ = build_stage_commands()
    assert " gcc " in first
    assert "pip wheel" in wheel
    assert ("ENV", "HATCH_BUILD_HOOK_ENABLE_MYPYC=true") in dockerfile()


def test_pip_downloads_what_the_lock_files_list_only() -> None:
    steps = [step.split() for step in build_stage_commands()[1].split("&&")]
    installs = [step for step in steps if "install" in step]
    assert [step[-1] for step in installs] == ["requirements-build.lock", "requirements.lock", "/wheels/*.whl"]
    assert all("--require-hashes" in step for step in installs[:2])
    assert all("--no-build-isolation" in step for step in steps if "wheel" in step), "isolation downloads other tools"
    assert all("--no-deps" in step for step in installs)
    assert any(step[-1] == "check" for step in steps), "a dependency that the lock file lacks ends the build"


@pytest.mark.parametrize(
    ("is_compiled", "is_optimized", "error"),
    [(True, True, ""), (True, False, "this build"), (True, None, "this build"), (False, True, "this build")],
)
def test_the_build_fails_without_a_compiled_wheel_and_an_optimized_interpreter(
    tmp_path: Path, is_compiled: bool, is_optimized: bool | None, error: str
) -> None:
    _, *check = exec_form(build_stage_commands()[-1])
    (tmp_path / "genie").mkdir()
    (tmp_path / "genie/__init__.py").touch()
    stub = f"IS_COMPILED = {is_compiled}\nis_optimized = lambda: {is_optimized}\ndescription = lambda: 'this build'\n"
    (tmp_path / "genie/build.py").write_text(stub)
    done = subprocess.run(
        [sys.executable, *check], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stderr.strip().endswith("this build")) == (int(bool(error)), bool(error))


# -- the compose file -----------------------------------------------------------------------------------------


PASSWORD_FILE = "/run/genie/redis-password"  # noqa: S105 - a path


def redis_command(service: dict[str, Any]) -> list[str]:
    """Return the words of the command with which Redis is started, without its shell and its entrypoint."""
    shell, option, script = service["command"]
    assert (shell, option) == ("sh", "-c")
    start, entrypoint, *command = script.partition(" <<")[0].split()
    assert (start, entrypoint) == ("exec", "docker-entrypoint.sh")
    return command


def test_the_services_of_the_compose_file() -> None:
    found = compose()
    redis, genie = found["services"]["redis"], found["services"]["genie"]
    assert found["services"].keys() == {"redis", "token", "genie"}

    command = redis_command(redis)
    assert re.fullmatch(r"redis:7\.2\.\d+-alpine", redis["image"]), "pinned, and Valkey reads its files"
    assert command[:2] == ["redis-server", "-"]
    assert dict(zip(command[2::2], command[3::2], strict=True)) == {
        "--appendonly": "yes",
        "--maxmemory-policy": "noeviction",
        "--maxmemory": "512mb",
    }
    assert "requirepass $$(cat /run/genie/redis-password)" in redis["command"][-1]
    mount, _ = redis["volumes"]
    volume, _, folder = mount.partition(":")
    assert volume in found["volumes"], "a named volume outlives the container"
    assert folder == "/data"
    assert "ports" not in redis

    assert genie["build"] == "."
    assert genie["environment"] == {
        "GENIE_TOKEN_FILE": "/run/genie/token",
        "GENIE_MAX_STATE": "${GENIE_MAX_STATE:-1073741824}",
        "GENIE_MAX_STATE_PER_PRINCIPAL": "${GENIE_MAX_STATE:-1073741824}",
        "GENIE_HISTORY_DIR": "${GENIE_HISTORY_DIR:-}",
        "GENIE_HISTORY_MAX_MB": f"${{GENIE_HISTORY_MAX_MB:-{Settings().history.max_mb}}}",
    }
    assert genie["depends_on"] == {
        "redis": {"condition": "service_healthy"},
        "token": {"condition": "service_completed_successfully"},
    }
    ports = [image_environment()[name] for name in ("GENIE_PORT", "GENIE_ADMIN_PORT")]
    assert genie["ports"] == [f"{LOOPBACK}:{port}:{port}" for port in ports], "connections are not encrypted"
    assert genie["volumes"] == ["token:/run/genie:ro", "history:/var/lib/genie"]
    assert "history" in found["volumes"]
    (folder,) = (copied for copied in final_stage()["COPY"] if copied.endswith(" /var/lib/genie"))
    assert f"--chown={argument_of('USER')}" in folder, "a new volume has the owner of the folder"
    assert "token" in found["volumes"]
    assert genie["read_only"] is True
    assert genie["cap_drop"] == ["ALL"]
    assert genie["security_opt"] == ["no-new-privileges:true"]
    assert redis["restart"] == genie["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", ["docker-compose.yml", "deploy/compose-ha.yml"])
def test_each_lasting_service_has_limits(name: str) -> None:
    services = yaml.safe_load((ROOT / name).read_text())["services"]
    lasting = {key: service for key, service in services.items() if "restart" in service}
    assert services.keys() - lasting.keys() == {"token"}
    for service in lasting.values():
        assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory", "pids"}
        environment = service.get("environment", {})
        if "GENIE_MAX_STATE" in environment:
            assert service["deploy"]["resources"]["limits"]["memory"] == "1G"
            assert environment["GENIE_MAX_STATE"] == "${GENIE_MAX_STATE:-1073741824}", "as counted: 0.6 GB in memory"
    assert any("GENIE_MAX_STATE" in service.get("environment", {}) for service in lasting.values())


def test_redis_rejects_commits_before_it_exceeds_its_limit() -> None:
    redis = compose()["services"]["redis"]
    assert redis["deploy"]["resources"]["limits"]["memory"] == "1G"
    command = redis_command(redis)
    assert command[command.index("--maxmemory") + 1] == "512mb"


def valkey_override() -> dict[str, Any]:
    (found,) = yaml.safe_load((ROOT / "deploy/compose-valkey.yml").read_text())["services"].values()
    assert isinstance(found, dict)
    return found


def test_valkey_has_the_options_and_the_health_check_of_redis() -> None:
    redis, valkey = compose()["services"]["redis"], valkey_override()
    assert re.fullmatch(r"valkey/valkey:8\.\d+\.\d+-alpine", valkey["image"])
    assert [part.replace("valkey", "redis") for part in valkey["command"]] == redis["command"]
    check = valkey["healthcheck"]["test"]
    assert [part.replace("valkey", "redis") for part in check] == redis["healthcheck"]["test"]


@pytest.mark.skipif(VALKEY is None, reason="make deploy-tools fetches valkey-server")
async def test_a_lock_survives_a_crash_of_the_server_and_of_valkey(tmp_path: Path) -> None:
    """Valkey runs with the command of the compose file, which keeps the locks on the disk."""
    _, _, *options = redis_command(valkey_override())
    valkey = Valkey(tmp_path, options)
    server = Genie(valkey)
    try:
        valkey.start()
        valkey.create_namespace()
        server.start()
        assert not any("redis" in line["event"].lower() for line in server.log_so_far()), "no warning"

        async with asyncio.timeout(WAIT_S):
            client = await Wire.connect(server.address)
            await client.lock("exclusive:a")
        server.kill()
        valkey.kill()
        valkey.start()
        server.start(wait=False)
        assert server.until("listening")["held_locks"] == 1
    finally:
        server.kill()
        valkey.kill()


def test_compose_generates_a_token_or_uses_the_given_one(tmp_path: Path) -> None:
    from genie.access import AccessControl

    service = compose()["services"]["token"]
    assert service["volumes"] == ["token:/run/genie"]
    assert service["environment"] == {"GENIE_TOKEN": "${GENIE_TOKEN:-}"}
    uid, gid = service["user"].split(":")
    assert (uid, gid) == ("0", argument_of("USER").split(":")[1]), (
        "root can write without capabilities, and the group of genie can read"
    )
    assert service["cap_drop"] == ["ALL"]
    assert service["network_mode"] == "none"
    program, *arguments = service["entrypoint"]
    assert program == "python"
    assert not any("$" in argument for argument in arguments), "compose would substitute a variable"
    path = tmp_path / "token"
    script = [argument.replace("/run/genie/token", str(path)) for argument in arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}

    def token(given: str) -> str:
        subprocess.run([sys.executable, *script], env=clean | {"GENIE_TOKEN": given}, check=True, timeout=WAIT_S)
        assert path.stat().st_mode & 0o777 == 0o640
        access = AccessControl.load(None, str(path))
        assert access.by_token(path.read_text()) is not None
        return path.read_text()

    generated = token("")
    assert token("") == generated, "a generated token is kept"
    assert token("a-token-of-the-tests") == "a-token-of-the-tests"
    for wrong in ("too-short", "a token of the tests", "a-token-of-the-tests\n"):
        rejected = subprocess.run(
            [sys.executable, *script],
            env=clean | {"GENIE_TOKEN": wrong},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert (rejected.returncode, rejected.stderr) == (
            1,
            "GENIE_TOKEN must have 16 characters or more, and no spaces\n",
        )
        assert path.read_text() == "a-token-of-the-tests", "the previous token is kept"


def test_the_grace_period_exceeds_the_drain_timeout() -> None:
    from genie.config import Settings

    grace = compose()["services"]["genie"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) * 1000 > Settings().drain_timeout_ms


def test_the_redis_options_its_password_and_its_health_check_work(tmp_path: Path) -> None:
    service = compose()["services"]["redis"]
    port, password = str(free_port()), tmp_path / "redis-password"
    password.write_text("a-password-of-the-tests")
    kind, check = service["healthcheck"]["test"]
    assert kind == "CMD-SHELL"

    def here(text: str) -> str:
        """Return a script of the file with the password, the port and the folder of this test."""
        text = text.replace("$$", "$").replace(PASSWORD_FILE, str(password)).replace("docker-entrypoint.sh ", "")
        text = text.replace("redis-server -", f"redis-server - --port {port} --bind {LOOPBACK} --dir {tmp_path}")
        return text.replace("redis-cli", f"redis-cli -p {port}")

    def healthy() -> bool:
        return not subprocess.run(
            ["sh", "-c", here(check)], capture_output=True, timeout=WAIT_S, check=False
        ).returncode

    assert not healthy()
    with subprocess.Popen(["sh", "-c", here(service["command"][-1])], stdout=subprocess.PIPE, text=True) as redis:
        try:
            assert redis.stdout is not None
            assert any("Ready to accept connections" in line for line in redis.stdout)
            assert healthy()
            assert (tmp_path / "appendonlydir").is_dir()
            without = ["redis-cli", "-p", port, "ping"]
            assert "NOAUTH" in subprocess.run(without, capture_output=True, text=True, check=False).stdout
            password.write_text("another-password")
            assert not healthy()
        finally:
            redis.kill()


def test_docker_compose_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    done = subprocess.run(
        [docker, "compose", "config", "--format", "json"], cwd=ROOT, capture_output=True, check=True, timeout=WAIT_S
    )
    found = json.loads(done.stdout)
    assert found["services"].keys() == compose()["services"].keys()
    assert found["services"]["genie"]["read_only"] is True


# -- the wheel, installed and run as in the image --------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Build the wheels from the files that the image copies, and no others. `make compiled` compiles as the image does."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for word, rest in dockerfile():
        if word == "COPY" and not rest.startswith("--from="):
            for name in rest.split()[:-1]:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, source)
    here = ["--no-build-isolation"] if find_spec("hatchling") else []  # otherwise pip downloads it
    (step,) = [step.split() for step in build_stage_commands()[1].split("&&") if " wheel " in step]
    projects = [str(source / name) for name in step[step.index("/wheels") + 1 :]]
    pip("wheel", "--no-deps", *here, "--wheel-dir", str(folder), *projects, compiled=COMPILED)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(wheels: list[Path]) -> Path:
    """Return the wheel of the lock server."""
    (found,) = [path for path in wheels if path.name.startswith("genie_lock-")]
    return found


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheels into a folder of its own. Their dependencies are those of this Python."""
    folder = tmp_path_factory.mktemp("image")
    pip("install", "--no-deps", "--no-index", "--target", str(folder), *map(str, wheels))
    base = tmp_path_factory.getbasetemp()
    for path in (folder, base, base.parent):
        path.chmod(path.stat().st_mode | 0o555)  # only the user of pytest may read its folders
    return folder


def pip(*arguments: str, compiled: bool = False) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    environment = os.environ | {"HATCH_BUILD_HOOK_ENABLE_MYPYC": "true" if compiled else "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr


def test_the_wheel_contains_all_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "genie").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {
        "genie/storage/redis/lua/checkpoint.lua",
        "genie/storage/redis/lua/acquire.lua",
        "genie/py.typed",
    } <= package
    extensions = {name for name in names if name.endswith(".so")}
    assert bool(extensions) is COMPILED
    assert {name for name in names - extensions if ".dist-info/" not in name} == package
    assert any(name.endswith("licenses/LICENSE") for name in names)


Identity = dict[str, Any]


@pytest.fixture(scope="module")
def python(installed: Path) -> tuple[str, Identity]:
    """Return a Python and the user to run it: an unprivileged one if this is root and such a Python exists, else this user."""
    ours = {"PYTHONPATH": f"{installed}:{sysconfig.get_path('platlib')}"}
    if os.geteuid() == 0:
        unprivileged: Identity = {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": []}
        for program in (
            sys.executable,
            shutil.which(f"python3.{sys.version_info.minor}", path="/usr/local/bin:/usr/bin"),
        ):
            try:
                subprocess.run(
                    [str(program), "-c", "import genie.server.app, redis"],
                    check=True,
                    capture_output=True,
                    cwd="/",
                    env=ours,
                    **unprivileged,
                )
            except (OSError, subprocess.CalledProcessError):
                continue
            return str(program), unprivileged
    return sys.executable, {}


class Container:
    """Starts the commands of the image as in a container: with its environment, unprivileged, without a writable folder."""

    def __init__(self, installed: Path, python: tuple[str, Identity]) -> None:
        self.port = free_port()
        self.installed = installed
        self.python, self.identity = python
        self.environment = image_environment() | {
            "PATH": str(installed / "bin"),
            "PYTHONPATH": f"{installed}:{sysconfig.get_path('platlib')}",
            "HOME": "/nonexistent",
            "GENIE_PORT": str(self.port),
            "GENIE_ADMIN_PORT": str(free_port()),
            "GENIE_TOKEN": "a-token-of-the-tests",
        }

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program is not None
        return subprocess.Popen(
            [self.python, program, *command[1:]],
            cwd="/",
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **self.identity,
        )

    def healthy(self, timeout_s: float | None = None) -> bool:
        """Return whether the health check succeeds, with another timeout if given."""
        options, _, command = argument_of("HEALTHCHECK").partition(" CMD ")
        allowed = float(re.findall(r"--timeout=(\d+)s", options)[0])
        arguments = exec_form(command)
        timeout_index = arguments.index("--timeout") + 1
        assert float(arguments[timeout_index]) < allowed, "the check must end before it is killed"
        if timeout_s is not None:
            arguments[timeout_index] = str(timeout_s)
        with self.start(arguments) as check:
            output, _ = check.communicate(timeout=2 * WAIT_S)
        assert check.returncode in (0, 1), output
        return check.returncode == 0


@pytest.fixture
def container(installed: Path, python: tuple[str, Identity]) -> Iterator[Container]:
    before = files(installed)
    yield Container(installed, python)
    assert files(installed) == before, "it has written into its installation"


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_the_installed_wheel_is_used(container: Container) -> None:
    script = "import genie.cli, sys; sys.stdout.write(genie.cli.__file__)"
    done = subprocess.run(
        [container.python, "-c", script],
        cwd="/",
        env=container.environment,
        capture_output=True,
        text=True,
        check=True,
        **container.identity,
    )
    assert Path(done.stdout).is_relative_to(container.installed)


def test_the_image_contains_the_applications(container: Container, tmp_path: Path, wheels: list[Path]) -> None:
    assert [path.name.partition("-")[0] for path in wheels] == ["genie_ledger", "genie_lock", "genie_tokens"]
    with container.start(["genie-ledger", "status", "--database", f"sqlite:///{tmp_path / 'missing.db'}"]) as command:
        output, _ = command.communicate(timeout=WAIT_S)
    assert command.returncode == 1
    assert output.endswith("missing.db: there is no such file\n")


def test_the_server_is_healthy_and_stops(container: Container) -> None:
    assert not container.healthy()
    with container.start([*exec_form(argument_of("ENTRYPOINT")), *exec_form(argument_of("CMD"))]) as server:
        try:
            assert server.stdout is not None
            first = json.loads(server.stdout.readline())
            assert (first["event"], first["host"], first["port"]) == (
                "listening",
                image_environment()["GENIE_HOST"],
                container.port,
            )
            assert container.healthy(WAIT_S)
            server.send_signal(getattr(signal, argument_of("STOPSIGNAL")))
            assert server.wait(WAIT_S) == 0
            assert not container.healthy()
        finally:
            server.kill()


def test_the_server_uses_the_redis_of_the_compose_file(container: Container, tmp_path: Path) -> None:
    """The Lua scripts are loaded from the wheel, and a stopped Redis makes the server unhealthy."""
    with running_redis() as redis:
        redis.create_namespace()
        assert "GENIE_TOKEN_FILE" in compose()["services"]["genie"]["environment"]
        *_, script = compose()["services"]["genie"]["entrypoint"]
        (url,) = re.findall(r'GENIE_REDIS_URL="(.*?)"', script)
        password = "a-password-of-the-tests"  # noqa: S105 - only used here
        redis.call("CONFIG", "SET", "requirepass", password)
        url = url.replace(f"$$(cat {PASSWORD_FILE})", password).replace("redis:6379", f"{LOOPBACK}:{redis.port}")
        token = tmp_path / "token"
        token.write_text(container.environment.pop("GENIE_TOKEN"))
        token.chmod(0o600)
        if container.identity:
            os.chown(token, UNPRIVILEGED, UNPRIVILEGED)
        for folder in (token.parent, token.parent.parent):
            folder.chmod(0o755)
        container.environment |= {"GENIE_REDIS_URL": url}
        container.environment |= {"GENIE_TOKEN_FILE": str(token)}
        container.environment |= {"GENIE_STORE_TIMEOUT_MS": "100", "GENIE_LEASE": "600"}
        with container.start([*exec_form(argument_of("ENTRYPOINT")), *exec_form(argument_of("CMD"))]) as server:
            timer = threading.Timer(WAIT_S, server.kill)
            timer.start()
            try:
                assert server.stdout is not None
                line = next(line for line in map(json.loads, server.stdout) if line["event"] == "listening")
                assert line["store"] == "redis"
                assert container.healthy(WAIT_S)
                redis.send(signal.SIGSTOP)
                assert any("store unavailable" in line for line in server.stdout)
                assert not container.healthy()
                redis.send(signal.SIGCONT)
                assert any("store available again" in line for line in server.stdout)
                assert container.healthy(WAIT_S)
            finally:
                timer.cancel()
                server.kill()
