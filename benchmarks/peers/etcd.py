"""etcd's lock service: one member, through its HTTP gateway, with a lease for each connection."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.peer import HOST, Running, Step, Wire, WirePeer, exchange, open_socket
from benchmarks.peers.processes import free_port, serving

LENGTH = re.compile(rb"\r\nContent-Length: (\d+)\r\n", re.IGNORECASE)
KEY = re.compile(rb'"key":"([^"]+)"')
LEASE_S = 60
OK = b"HTTP/1.1 200 "


def post(path: str, body: object) -> bytes:
    """Encode a request to the gateway."""
    text = json.dumps(body).encode()
    return b"POST /v3/%s HTTP/1.1\r\nHost: etcd\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(text), text)


def complete(data: bytes) -> bool:
    """Return whether the bytes are a complete response."""
    head, end, body = data.partition(b"\r\n\r\n")
    length = LENGTH.search(head + b"\r\n")
    if length is None:
        return body.endswith(b"0\r\n\r\n")
    return bool(end) and len(body) >= int(length[1])


class EtcdWire(Wire):
    """Waits in etcd's queue: the response arrives when the lock is granted."""

    def __init__(self, sock: socket.socket, key: str, number: int) -> None:
        answer = exchange(sock, post("lease/grant", {"TTL": str(LEASE_S)}), complete)
        lease = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])["ID"]
        super().__init__(
            sock, number, lock=post("lock/lock", {"name": b64encode(key.encode()).decode(), "lease": lease})
        )

    def complete(self, data: bytes) -> bool:
        """See `Wire`."""
        return complete(data)

    def answer(self, data: bytes) -> Step:
        """See `Wire`."""
        if not data.startswith(OK):
            return Step.ERROR
        if self.unlock:
            self.unlock = b""
            return Step.UNLOCKED
        if found := KEY.search(data):
            self.unlock = post("lock/unlock", {"key": found[1].decode()})
            return Step.LOCKED
        return Step.ERROR


class Etcd(WirePeer):
    """A new etcd member with default settings."""

    name = "etcd's lock service"
    slug = "etcd"

    def missing(self) -> str | None:
        """See `Peer`."""
        return None if shutil.which("etcd") else "etcd is not installed"

    @contextmanager
    def running(self, folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
        """See `Peer`."""
        port = free_port()
        clients, peers = f"http://{HOST}:{port}", f"http://{HOST}:{free_port()}"
        command = [
            *[*prefix, "etcd", "--name", "one", "--data-dir", str(folder / "data"), "--log-level", "error"],
            *["--listen-client-urls", clients, "--advertise-client-urls", clients],
            *["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"one={peers}"],
        ]
        said = subprocess.run(["etcd", "--version"], capture_output=True, text=True, check=True).stdout  # noqa: S607
        version = re.findall(r"[\d.]+", said)[0]

        def ready() -> None:
            with open_socket(port) as sock:
                answer = exchange(sock, post("kv/range", {"key": "AA=="}), complete)
            if not answer.startswith(OK):
                raise ConnectionRefusedError

        with serving(command, folder / "etcd.log", ready) as pid:
            yield Running(port, (pid,), (f"etcd {version}",))

    def connect(self, running: Running, key: str, number: int) -> Wire:
        """See `WirePeer`."""
        return EtcdWire(open_socket(running.port), key, number)
