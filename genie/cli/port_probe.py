"""What already listens on a port that `genie serve` could not have."""

from __future__ import annotations

import socket
from contextlib import suppress

from genie.cli.format import printable
from genie.protocol import codec

PROBE_TIMEOUT_S = 2.0
MAX_REPLY = 4096
"""Bytes that are read of a reply. A reply to `hello` has a few hundred."""
HELLO = codec.message("hello", {})
REPLIES = ("welcome", "error")
"""What a Genie server answers to `hello`; an error where it has tokens, speaks TLS, or follows another server."""


def describe_listener(host: str, port: int) -> str:
    """Ask what listens on a port: "another Genie server (0.1.0)", or a program that is none.

    Empty where nothing accepts a connection. No token is sent.
    """
    try:
        reply = _exchange(host, port)
    except TimeoutError:
        return f"a program that does not answer within {PROBE_TIMEOUT_S:g} s"
    except OSError:
        return ""
    try:
        message = codec.loads(reply)
        is_genie = message["command"] in REPLIES
        payload = message["payload"]
        version = payload.get("server", payload.get("version"))
    except (ValueError, LookupError, TypeError, AttributeError):
        is_genie, version = False, None
    if not is_genie:
        return "a program that is not a Genie server"
    return "another Genie server" + (f" ({printable(version)})" if isinstance(version, str) else "")


def _exchange(host: str, port: int) -> bytes:
    """Send `hello`; return the first line of the reply, empty where the connection was closed without one."""
    reply = b""
    sock = socket.create_connection((host or "localhost", port), PROBE_TIMEOUT_S)
    with sock, suppress(ConnectionError):
        sock.sendall(HELLO)
        while b"\n" not in reply and len(reply) < MAX_REPLY:
            received = sock.recv(MAX_REPLY)
            if not received:
                break
            reply += received
    return reply.partition(b"\n")[0]
