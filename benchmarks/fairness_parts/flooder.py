"""Floods a server from a separate process: `flooder.py PORT CONNECTIONS`.

Reads the commands to repeat from its standard input, up to its end. Each connection sends them as
fast as the server reads, and reads all replies. On SIGTERM it prints a JSON object: the number of
replies, and the duration in seconds.
"""

from __future__ import annotations

import gc
import json
import select
import signal
import socket
import sys
import time
from contextlib import suppress

CHUNK = 256 << 10
"""Bytes in one write, unless one repetition is longer."""


class Client:
    """One connection of the flood."""

    def __init__(self, port: int, commands: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setblocking(False)
        self._commands = commands
        self._rest = memoryview(commands)
        self.answers = 0

    def send(self) -> None:
        """Send as much as the socket accepts."""
        with suppress(BlockingIOError):
            self._rest = self._rest[self.sock.send(self._rest) :] or memoryview(self._commands)

    def receive(self) -> None:
        """Count the replies that were received."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        if not data:
            raise SystemExit("the server closed a connection")
        self.answers += data.count(b"\n")


def _main(port: int, connections: int) -> None:
    gc.disable()
    line = sys.stdin.buffer.read()
    commands = line * max(1, CHUNK // len(line))
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    poll = select.epoll()
    clients = {}
    for _ in range(connections):
        client = Client(port, commands)
        clients[client.sock.fileno()] = client
        poll.register(client.sock, select.EPOLLIN | select.EPOLLOUT)
    print("ready", flush=True)
    began = time.monotonic()
    while not ended:
        for file, events in poll.poll(0.1):
            client = clients[file]
            if events & select.EPOLLOUT:
                client.send()
            if events & ~select.EPOLLOUT:
                client.receive()
    took_s = time.monotonic() - began
    print(json.dumps([sum(client.answers for client in clients.values()), took_s]), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
