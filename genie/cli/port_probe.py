"""Describes the program that listens on a port, when `genie serve` can't listen there."""

from __future__ import annotations

import socket
from contextlib import suppress

from genie.protocol import codec
from genie.text import printable

PROBE_TIMEOUT_S = 2.0
"""Time limit for the connection, and for each part of the reply."""
MAX_REPLY_BYTES = 4096
"""A longer reply is truncated. A reply to `hello` has a few hundred bytes."""
HELLO = codec.message("hello", {})
REPLIES = ("welcome", "error")
"""Replies of a Genie server to `hello`. The reply is an error if the server requires a token or TLS, or is a follower."""


def describe_listener(host: str, port: int) -> str:
    """Send `hello` to a port, and describe the program that listens there, e.g. "another Genie server (1.0.0)".

    Returns an empty string if the connection fails.
    """
    try:
        reply = _read_reply(host, port)
    except TimeoutError:
        return f"a program that did not respond within {PROBE_TIMEOUT_S:g} s"
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


def _read_reply(host: str, port: int) -> bytes:
    """Send `hello`, and return the first line of the reply.

    The line may be empty or incomplete if the program closes the connection early. Raises OSError if the connection
    fails, and TimeoutError if there is no reply.
    """
    reply = b""
    sock = socket.create_connection((host or "localhost", port), PROBE_TIMEOUT_S)
    with sock, suppress(ConnectionError):
        sock.sendall(HELLO)
        while b"\n" not in reply and len(reply) < MAX_REPLY_BYTES:
            received = sock.recv(MAX_REPLY_BYTES)
            if not received:
                break
            reply += received
    return reply.partition(b"\n")[0]
