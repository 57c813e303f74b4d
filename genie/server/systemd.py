"""Reports the state of the server to systemd: the notification protocol of `sd_notify(3)`.

systemd sets `NOTIFY_SOCKET` for a unit with `Type=notify`, and `WATCHDOG_USEC` for a unit with `WatchdogSec=`. Each message
is one datagram to that socket. Without `NOTIFY_SOCKET` there is no notifier, and so neither a socket nor a timer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping

import structlog

log = structlog.get_logger()

STATUS_INTERVAL_S = 1.0
"""Seconds between two reports. A shorter watchdog timeout shortens the interval to half of the timeout."""


class SystemdNotifier:
    """Sends READY, STATUS, WATCHDOG, RELOADING and STOPPING to the service manager.

    The watchdog messages are sent by a timer of the event loop: a server whose event loop hangs sends none, and systemd
    restarts the server. A message that cannot be sent is logged once and does not affect the server.

    Args:
        address: the socket's path; an abstract name begins with `@`.
        watchdog_s: seconds without a WATCHDOG message after which systemd ends the server. None without a watchdog.
        read_status: returns the current text of STATUS.

    """

    def __init__(self, address: str, watchdog_s: float | None, read_status: Callable[[], str]) -> None:
        # In the environment, `@` stands for the NUL byte with which the name of an abstract socket begins.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._sends_watchdog = watchdog_s is not None
        self._interval_s = STATUS_INTERVAL_S if watchdog_s is None else min(STATUS_INTERVAL_S, watchdog_s / 2)
        self._read_status = read_status
        self._reported_status = ""
        self._has_failed = False
        """True if a notification has failed, so that no further failure is logged."""
        self._timer: asyncio.TimerHandle | None = None
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], read_status: Callable[[], str]) -> SystemdNotifier | None:
        """Return a notifier for the service manager, or None if no service manager expects messages of this server."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address:
            return None
        if address[0] not in "/@" or len(address) == 1:
            log.warning(
                "NOTIFY_SOCKET invalid, systemd is not notified",
                notify_socket=address,
                hint="must be an absolute path, or an abstract name that begins with @",
            )
            return None
        return cls(address, _watchdog_timeout_s(environment), read_status)

    def start(self) -> None:
        """Report a changed status and, if there is a watchdog, that the server runs.

        Repeat this at intervals until `close`.
        """
        fields = ["WATCHDOG=1"] if self._sends_watchdog else []
        status = self._read_status()
        if status != self._reported_status:
            self._reported_status = status
            fields.append(f"STATUS={status}")
        if fields:
            self._send(*fields)
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.start)

    def ready(self) -> None:
        """Report that the server listens."""
        self._reported_status = self._read_status()
        self._send("READY=1", f"STATUS={self._reported_status}")

    def reloading(self) -> None:
        """Report that the server reads its files again. `ready` must follow."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """Report that the server drains and stops. The watchdog messages continue until `close`."""
        self._reported_status = self._read_status()
        self._send("STOPPING=1", f"STATUS={self._reported_status}")

    def close(self) -> None:
        """Cancel the timer and close the socket."""
        if self._timer is not None:
            self._timer.cancel()
        self._sock.close()

    def _send(self, *fields: str) -> None:
        """Send one datagram with these fields, such as `READY=1`. Log the first failure."""
        try:
            self._sock.sendto("\n".join(fields).encode(), self._address)
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "systemd notification failed, further failures are not logged",
                    message=" ".join(fields),
                    reason=str(error),
                )
            self._has_failed = True


def _watchdog_timeout_s(environment: Mapping[str, str]) -> float | None:
    """Return the watchdog timeout, or None if systemd expects no watchdog messages of this process."""
    timeout_us = environment.get("WATCHDOG_USEC", "")
    if not timeout_us.isdecimal() or int(timeout_us) == 0:
        return None
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(timeout_us) / 1e6
