"""PostgreSQL's advisory locks: a session for each connection, prepared statements, messages encoded
by hand.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import struct
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.peer import HOST, PeerFailed, Running, Step, Wire, WirePeer, exchange, open_socket
from benchmarks.peers.processes import free_port, serving
from benchmarks.peers.stopping import defer_signals

USER = "postgres"
READY = b"Z\0\0\0\5I"
"""The end of every reply: ready for a query, in no transaction."""
TRUE = b"D\0\0\0\x0b\0\1\0\0\0\1\1"
"""A row with one field, which is true."""
BOUND = b"2"
FAILED = b"E"
PROTOCOL = 196608
INT8 = 20


def program(name: str) -> str | None:
    """Return the path of a program: on PATH, or in Debian's directory."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    return shutil.which(name) or (str(found[-1]) if found else None)


def message(kind: bytes, body: bytes) -> bytes:
    """Encode a message of the protocol."""
    return kind + struct.pack("!i", 4 + len(body)) + body


def prepare(name: bytes, query: bytes) -> bytes:
    """Encode the preparation of a statement with one int8 parameter."""
    return message(b"P", name + b"\0" + query + b"\0" + struct.pack("!hi", 1, INT8))


def execute(name: bytes, value: int) -> bytes:
    """Encode the execution of a prepared statement, with binary parameter and result."""
    bind = b"\0" + name + b"\0" + struct.pack("!hhhiqhh", 1, 1, 1, 8, value, 1, 1)
    return message(b"B", bind) + message(b"E", b"\0" + struct.pack("!i", 0)) + message(b"S", b"")


STATEMENTS = (
    prepare(b"lock", b"SELECT pg_advisory_lock($1)")
    + prepare(b"unlock", b"SELECT pg_advisory_unlock($1)")
    + message(b"S", b"")
)


def session(port: int) -> socket.socket:
    """Open an authenticated session. OSError if the server is not ready."""
    login = struct.pack("!i", PROTOCOL) + b"user\0%b\0database\0postgres\0\0" % USER.encode()
    sock = open_socket(port)
    answer = exchange(sock, message(b"", login), lambda data: data.endswith(READY) or data.startswith(FAILED))
    if answer.startswith(FAILED):
        sock.close()
        raise ConnectionRefusedError(answer.decode(errors="replace"))
    return sock


class PostgresWire(Wire):
    """`pg_advisory_lock` and `pg_advisory_unlock` of a number derived from the key."""

    def __init__(self, sock: socket.socket, key: str, number: int) -> None:
        exchange(sock, STATEMENTS, self.complete)
        lock = zlib.crc32(key.encode())
        super().__init__(sock, number, lock=execute(b"lock", lock), unlock=execute(b"unlock", lock))
        self._locked = False

    def complete(self, data: bytes) -> bool:
        """See `Wire`."""
        return data.endswith(READY)

    def answer(self, data: bytes) -> Step:
        """See `Wire`."""
        if not data.startswith(BOUND):
            return Step.ERROR
        if self._locked:
            self._locked = False
            return Step.UNLOCKED if TRUE in data else Step.ERROR
        self._locked = True
        return Step.LOCKED


class Postgres(WirePeer):
    """A new cluster with the settings of `initdb`."""

    name = "PostgreSQL advisory locks"
    slug = "postgres"

    def missing(self) -> str | None:
        """See `Peer`."""
        if program("initdb") is None or program("postgres") is None:
            return "the server of PostgreSQL is not installed"
        if os.getuid() == 0 and _user() is None:
            return f"PostgreSQL does not run as root, and there is no user {USER}"
        return None

    @contextmanager
    def running(self, folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
        """See `Peer`."""
        initdb, server = program("initdb"), program("postgres")
        assert initdb  # noqa: S101 - else it is missing
        assert server  # noqa: S101
        user, data, port = _user(), folder / "data", free_port()
        if user is not None:
            shutil.chown(folder, user)
        with defer_signals():  # it has processes of its own
            made = subprocess.run(
                [initdb, "--auth=trust", "--no-sync", f"--username={USER}", "--pgdata", str(data)],
                capture_output=True,
                text=True,
                user=user,
                group=user,
                cwd=folder,
                check=False,
            )
        if made.returncode:
            raise PeerFailed(f"initdb: {made.stderr.strip()}")
        said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
        version = re.findall(r"[\d.]+", said)[0]
        command = [*prefix, server, "-D", str(data), "-h", HOST, "-p", str(port), "-k", ""]
        with serving(
            command, folder / "postgres.log", lambda: session(port).close(), user=user, stop=signal.SIGINT
        ) as pid:
            yield Running(port, (pid,), (f"PostgreSQL {version}",))

    def connect(self, running: Running, key: str, number: int) -> Wire:
        """See `WirePeer`."""
        return PostgresWire(session(running.port), key, number)


def _user() -> str | None:
    """Return the user to run the server as, since it must not be root; None for the current user."""
    if os.getuid() != 0:
        return None
    try:
        return pwd.getpwnam(USER).pw_name
    except KeyError:
        return None
