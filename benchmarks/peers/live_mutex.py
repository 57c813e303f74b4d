"""live-mutex: a broker in Node.js, with the messages of its client."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.peer import HOLD_MS, Running, Step, Wire, WirePeer, open_socket
from benchmarks.peers.processes import accepts, free_port, serving

BROKER = "new (require({module}).Broker)({{host: '127.0.0.1', port: {port}}}).ensure()"
PORTS = 49_152
"""The largest port that it accepts."""
FIND = "console.log(require.resolve('live-mutex'))"
ME = b'"max":null,"pid":1,"keepLocksAfterDeath":false}\n'


def module() -> Path | None:
    """Return the path of the Node.js module: below NODE_PATH, or installed with `npm install
    --global`.
    """
    if shutil.which("node") is None or shutil.which("npm") is None:
        return None
    root = subprocess.run(["npm", "root", "--global"], capture_output=True, text=True, check=False).stdout.strip()  # noqa: S607
    environment = os.environ | {"NODE_PATH": os.pathsep.join([os.environ.get("NODE_PATH", ""), root])}
    found = subprocess.run(["node", "-e", FIND], capture_output=True, text=True, env=environment, check=False)  # noqa: S607
    return Path(found.stdout.strip()) if found.returncode == 0 else None


class LiveMutexWire(Wire):
    """Confirms the lock and releases it in one write, as its client does if it does no work under
    the lock.
    """

    def __init__(self, sock: socket.socket, key: str, number: int, version: str) -> None:
        super().__init__(sock, number)
        sock.sendall(b'{"type":"version","value":"%s",%s' % (version.encode(), ME))
        self._key = key.encode()
        self._turn = 0
        self._asked = b""
        self._ask()

    def _uuid(self) -> bytes:
        self._turn += 1
        return b"%08x-0000-4000-8000-%012x" % (self.number, self._turn)

    def _ask(self) -> None:
        self._asked = self._uuid()
        fields = (self._asked, self._key, HOLD_MS, ME)
        self.lock = b'{"type":"lock","uuid":"%s","key":"%s","ttl":%d,"retryCount":0,"rwStatus":null,%s' % fields

    def _give_back(self) -> None:
        locked, self._asked = self._asked, self._uuid()
        received = b'{"type":"lock-received","uuid":"%s","key":"%s",%s' % (locked, self._key, ME)
        fields = (locked, self._asked, self._key, ME)
        self.unlock = received + (
            b'{"type":"unlock","_uuid":"%s","uuid":"%s","key":"%s","rwStatus":null,"force":false,%s' % fields
        )

    def answer(self, data: bytes) -> Step:
        """See `Wire`."""
        if self._asked not in data or b'"error"' in data or b'"reelection"' in data:
            return Step.ERROR
        if b'"acquired":true' in data:
            self._give_back()
            return Step.LOCKED
        if b'"unlocked":true' in data:
            self._ask()
            return Step.UNLOCKED
        return Step.WAIT if b'"acquired":false' in data else Step.ERROR


class LiveMutex(WirePeer):
    """A broker with default settings."""

    name = "live-mutex"
    slug = "live-mutex"

    def __init__(self) -> None:
        self._version = ""

    def missing(self) -> str | None:
        """See `Peer`."""
        if module() is None:
            return "live-mutex is not installed: `npm install --global live-mutex`, or set NODE_PATH"
        return None

    @contextmanager
    def running(self, folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
        """See `Peer`."""
        found, port = module(), free_port(PORTS)
        assert found is not None  # noqa: S101 - else it is missing
        self._version = json.loads((found.parents[1] / "package.json").read_text())["version"]
        node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()  # noqa: S607
        command = [*prefix, "node", "-e", BROKER.format(module=json.dumps(str(found)), port=port)]
        with serving(command, folder / "live-mutex.log", lambda: accepts(port)) as pid:
            yield Running(port, (pid,), (f"live-mutex {self._version}", f"Node.js {node.removeprefix('v')}"))

    def connect(self, running: Running, key: str, number: int) -> Wire:
        """See `WirePeer`."""
        return LiveMutexWire(open_socket(running.port), key, number, self._version)
