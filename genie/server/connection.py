"""One TCP connection: bytes to lines, lines to the command handler, messages to bytes; flow control in both directions."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, cast

import structlog

from genie import work_time
from genie.access import Principal
from genie.errors import Code, RequestRejected
from genie.net import enable_keepalive
from genie.observability.limited_log import log_limited
from genie.protocol import replies
from genie.protocol.commands import Hello, http_rejection, is_http, read_hello
from genie.protocol.diagnostics import hello_token
from genie.protocol.framing import (
    MIN_COMMAND_BYTES,
    SPLIT_BYTES,
    LineReader,
    LineTooLong,
    UnsplitLines,
    mark_long,
    without_blank,
)
from genie.server.auth import ACCESS_REVOKED, NO_HELLO, TLS_RECORD, Denial
from genie.server.peer import END_OF_INPUT, READY, CommandHandler, ConnectionState, Peer, principal_name
from genie.server.rejections import unavailable
from genie.server.unread_output import COMMAND_FACTOR, MAX_WRITE_BYTES, TLS_WRITE_BUFFER_BYTES, WRITE_BUFFER_BYTES
from genie.tls import certificate_name
from genie.tls_accept import BelowTls, TurnsObject

if TYPE_CHECKING:
    from genie.config import Limits
    from genie.server.auth import Authenticator, Handshake
    from genie.server.listener import AdmissionControl

log = structlog.get_logger()

SLOW_CONSUMER_GRACE_S = 5.0
"""Seconds for which a slow consumer may still read its output buffer, with the error at its end, before it is aborted."""

LINGER_S = 5.0
"""Maximum time in seconds for which a closing connection lingers, that is, discards further input of the client."""
MAX_LINGER_BYTES = 64 << 20
"""Maximum bytes that a lingering connection discards."""
LINGER_IDLE_S = 1.0
"""Seconds without input after which a lingering connection is closed."""

OPENING_QUANTUM_S = 0.0005
"""Seconds after which a connection with many lines after a rejected `hello` lets other connections run."""

KEEPALIVE_IDLE_S = 15
"""Idle time in seconds after which TCP keepalive starts. A client whose machine crashed is disconnected after half a minute.
With the kernel's default of two hours, the locks that end with the connection would stay held for that time."""

FindHandler = Callable[[str | None], CommandHandler | RequestRejected]
"""Returns the handler of the namespace that a `hello` names, or of the default namespace for None. Returns an error for an
unknown namespace."""


class Connection(Peer, asyncio.Protocol):
    """Reads lines, submits commands to a handler in order, and writes messages.

    A connection without a `hello` uses `handler`; a `hello` selects the handler with `find_handler`. `admission` counts
    open connections and rejects connections beyond the limits. Without `authenticator` no authentication is required.
    """

    __slots__ = (
        "_admission",
        "_authenticator",
        "_discarded_bytes",
        "_encrypted_output",
        "_eof",
        "_find_handler",
        "_handshake",
        "_held_bytes",
        "_held_output",
        "_is_ending",
        "_limits",
        "_lines",
        "_lingers_until",
        "_max_whole_bytes",
        "_partial_bytes",
        "_postponed_input",
        "_postponed_lines",
        "_transport",
        "_writable",
        "certificate",
        "handler",
    )

    def __init__(
        self,
        handler: CommandHandler,
        limits: Limits,
        admission: AdmissionControl[Connection],
        authenticator: Authenticator | None = None,
        find_handler: FindHandler | None = None,
    ) -> None:
        super().__init__()
        # More than 16 fields with those of `Peer`: a server has thousands of connections, and each object takes memory.
        self.handler = handler
        """The handler that commands are submitted to. It is replaced when the server's role changes."""
        self._find_handler = find_handler
        """Selects the handler of a `hello`. Without it, `handler` serves every `hello`."""
        self._limits = limits
        self._admission = admission
        """The open connections of the server, and their limits."""
        self._authenticator = authenticator
        self._handshake: Handshake | None = None
        """The authentication in progress, which the first line completes."""
        self.certificate: str | None = None
        """The name in the client's verified certificate. None without a certificate, or if a token authenticated the client."""
        self._transport: asyncio.Transport | None = None
        self._writable: asyncio.Transport | None = None
        """The transport while messages may be passed to it. None while `write_blocked`, and once nothing more is sent."""
        self._encrypted_output: BelowTls | None = None
        """The output below TLS that the client has not read. None without TLS."""
        self._held_output: deque[bytearray] = deque()
        """Output that is passed to the transport when the client has read earlier output, in parts of at most
        `MAX_WRITE_BYTES`. Empty unless `write_blocked`. The transport would keep 900 bytes for each message, and a watcher
        may get many short ones."""
        self._held_bytes = 0
        """Bytes of `_held_output`."""
        self._lines = LineReader(limits.max_line)
        """Splits the input into lines, and keeps the incomplete last line."""
        self._postponed_input = bytearray()
        """Bytes read before the connection is READY that wait for their turn. Reading is paused until they are processed."""
        self._postponed_lines: Iterator[bytes] | None = None
        """Lines after a rejected `hello` that are not processed yet. Reading is paused until they are processed."""
        self._max_whole_bytes = min(SPLIT_BYTES, limits.max_line)
        """Maximum bytes of a read that is split into lines at once, and that cannot contain a line that is too long."""
        self._partial_bytes = 0
        """Bytes of the incomplete line and of the postponed lines, as last reported to `admission`."""
        self._eof = False
        """True if the client closed its sending side (half-close)."""
        self._is_ending = False
        """True if nothing more is sent after the held output. Then the connection is closed."""
        self._lingers_until = 0.0
        """Event-loop time until which the closing connection lingers. 0 if it does not linger."""
        self._discarded_bytes = 0
        """Bytes that were received and discarded while the connection was closing."""

    # -- the event loop's callbacks -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection and start its authentication, or reject it if it exceeds the limits."""
        if self._find_handler is not None:  # the server's role may have changed since the connection was accepted
            current = self._find_handler(None)
            if not isinstance(current, RequestRejected):  # there always is a default namespace
                self.handler = current
        self._transport = self._writable = cast("asyncio.Transport", transport)
        tls = transport.get_extra_info("ssl_object")
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES if tls is None else TLS_WRITE_BUFFER_BYTES)
        if isinstance(tls, TurnsObject) and tls.turn is not None:
            self._encrypted_output = tls.turn.track_output(self, high_bytes=TLS_WRITE_BUFFER_BYTES)
        self.certificate = certificate_name(transport.get_extra_info("peercert"))
        peer = transport.get_extra_info("peername")
        over_limit = self._admission.admit(self, peer[0] if peer else "")
        if over_limit is not None:
            self._reject_connection(RequestRejected(Code.TOO_MANY, over_limit))
        elif self._authenticator is not None:
            self._handshake, principal = self._authenticator.begin(self.certificate, self._limits.max_line)
            if principal is not None:
                self._set_principal(principal)
            if self._handshake is not None:
                self.enter_state(ConnectionState.AUTHENTICATING)
                if self.principal is None:  # a client with a certificate may send its first line at any time
                    self._handshake.start_timer(self.reject_unauthenticated)
        enable_keepalive(transport.get_extra_info("socket"), idle_s=KEEPALIVE_IDLE_S)
        optional_fields = {} if self.certificate is None else {"certificate": self.certificate}
        log.debug("connection opened", peer=peer, open_connections=len(self._admission), **optional_fields)

    def data_received(self, data: bytes) -> None:
        """Submit the lines that the received bytes complete. The handler decodes the lines when it executes them."""
        size = len(data)
        if size <= self._max_whole_bytes and self.state is READY and not self._partial_bytes and not self.closing:
            lines = data.split(b"\n")
            if not lines.pop():  # the usual case: complete lines, and nothing else
                if size < MIN_COMMAND_BYTES * len(lines):  # some lines must be blank, or invalid
                    if any(lines):
                        self._submit(lines, size)
                    return
                self.handler.submit(self, lines, size)
                return
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        """Process received bytes. Before the connection is READY, process them only when it is its turn.

        If the connection is closing, discard them.
        """
        if self.closing:
            self._discarded_bytes += len(data)
            if self._lingers_until and self._discarded_bytes > MAX_LINGER_BYTES and self._transport is not None:
                self._transport.close()
        elif self.state is READY or self._postponed_lines is not None:
            self._process(data)
        elif self._postponed_input:  # reading is paused, but TLS may deliver input that it received earlier
            self._postponed_input += data
        else:
            turns, is_rejected = self._admission.opening_turns, self.state is ConnectionState.HELLO_REJECTED
            if turns.has_spare_time if is_rejected else turns.has_time:
                turns.run(partial(self._process, data))
            else:
                self._postponed_input += data
                self._update_reading()
                turns.postpone(self._owner, self._process_postponed_input, later=is_rejected)

    def _process_postponed_input(self) -> None:
        """Process the postponed input, because it is its turn."""
        data = bytes(self._postponed_input)
        self._postponed_input.clear()
        if not self.closed and not self.closing:
            self._process(data)
        self._update_reading()

    def _process(self, data: bytes) -> None:
        """Authenticate the client, or submit the lines that received bytes complete."""
        if self.state is not READY:
            data = self._receive_before_ready(data)
        partial_bytes = len(self._lines.partial)
        postponed_bytes = 0 if self._postponed_lines is None else self._partial_bytes - partial_bytes
        try:
            lines = self._lines.feed(data)
        except LineTooLong as too_long:
            self._reject_long_line(too_long)
            return
        # Of all complete lines, also of their bytes that earlier reads have received.
        size = partial_bytes + len(data) - len(self._lines.partial)
        has_completed_line = type(lines) is not list or bool(lines)  # `UnsplitLines` contain at least one line
        if type(lines) is list and size < MIN_COMMAND_BYTES * len(lines):  # some lines must be blank, or invalid
            lines = without_blank(lines)
        if lines and self.state is not READY:
            lines = self._process_opening_lines(iter(lines))
        if lines:
            self._submit(lines, size)
        if self.closing:
            return
        if self._postponed_lines is not None:
            self._count_partial(postponed_bytes + size + len(self._lines.partial), new=has_completed_line)
        elif self._lines.partial or self._partial_bytes:
            # If a line was completed, the incomplete line is another one than at the last update.
            self._count_partial(len(self._lines.partial), new=has_completed_line)
            self.handler.on_partial_line(self, self._partial_bytes)

    def _count_partial(self, size: int, *, new: bool) -> None:
        """Report the bytes of the incomplete line, and of postponed lines, which no handler counts."""
        self._partial_bytes = size
        self._admission.partial_lines.update(self, size, new=new)

    def _submit(self, lines: list[bytes] | UnsplitLines, size: int) -> None:
        """Submit complete lines to the handler. The scheduler marks the long ones of `UnsplitLines` when it splits them."""
        if isinstance(lines, list) and size < MIN_COMMAND_BYTES * len(lines):
            lines = without_blank(lines)
        if not lines:
            return
        if isinstance(lines, list):
            self.handler.submit(self, mark_long(lines), size)
        else:  # many short lines count as large input, which is split in parts
            self.handler.submit(self, lines, max(size, SPLIT_BYTES + 1))

    def eof_received(self) -> bool:
        """Close the connection after the replies to all commands that were read, because the client has half-closed it.

        A client that is not authenticated is rejected. Return True to keep the transport open for the replies, or False
        with TLS, which has no half-close.
        """
        self._eof = True
        if self._lingers_until:  # all replies are sent
            return False
        if self.state is not ConnectionState.AUTHENTICATING or self.principal is not None:
            if not self.closing:
                self._submit_end()
        elif self._handshake is not None and self._handshake.received:  # an incomplete first line
            self.reject_unauthenticated()
        else:
            self.finish()
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the cause does not matter
        """Tell the handler that the connection is lost, so that it releases the locks bound to the connection."""
        self.closed = True
        self._transport = self._writable = None  # asyncio's transport may raise AttributeError if it is aborted now
        self._encrypted_output = None  # breaks a reference cycle
        self._held_output.clear()
        self._held_bytes = 0
        self._admission.leave(self)
        if self._handshake is not None:
            self._handshake.stop_timer()
            self._handshake = None  # breaks a reference cycle: the timer refers to the connection
        if self.state is not ConnectionState.AUTHENTICATING:
            self.handler.on_disconnect(self)
        else:
            self.session.dispose()  # the handler does not know the connection

    def pause_writing(self) -> None:
        """Stop reading commands (back pressure), because the client does not read its messages.

        With TLS, the output has two buffers, and each of them may call this method.
        """
        if self.write_blocked:
            return
        self.write_blocked = True
        self._writable = None
        self._update_reading()
        self._admission.unread_output.add(self, self.blocked_bytes)

    def resume_writing(self) -> None:
        """Resume reading and executing commands, because the client has read enough messages."""
        is_paused_below_tls = self._encrypted_output is not None and self._encrypted_output.is_paused
        if is_paused_below_tls or not self.write_blocked:
            return
        self.write_blocked = False
        self._admission.unread_output.discard(self)
        transport = self._transport
        if transport is not None and not self._lingers_until:
            if not self._is_ending:
                self._writable = transport
            self._write_held_output(transport)
            if self._is_ending and not self._held_output and not transport.is_closing():
                self._end_output(transport)
        if not self.write_blocked:  # otherwise the client has to read that first
            self._update_reading()
            self.handler.on_writable(self)

    # -- output -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the deferred watch events, then all messages of the batch, in one write. Do nothing if the batch has none."""
        outbox, writable = self.outbox, self._writable
        if not outbox:  # for example: the request of a quiet client waits
            self.has_reply = False
        elif self.watch_bytes or writable is None:
            super().flush()
        else:  # the usual case
            self.has_reply = False
            data = b"".join(outbox)
            outbox.clear()
            if len(data) <= MAX_WRITE_BYTES:
                writable.write(data)
            else:
                self._write(data)

    def _write(self, data: bytes) -> None:
        """Write to the client, a long output in parts. While the client does not read, hold the output."""
        transport, writable = self._transport, self._writable
        if not data or self.closed or transport is None or self._is_ending:
            return
        if writable is None:
            self._write_later(transport, data)
        elif len(data) <= MAX_WRITE_BYTES:
            writable.write(data)
        else:
            self._hold(data)
            self._write_held_output(writable)

    def _write_later(self, transport: asyncio.Transport, data: bytes) -> None:
        """Hold output, because the client does not read. If it has too many unread bytes, disconnect it instead."""
        # `data` does not count: one large batch is allowed to exceed the limit.
        if self.unread_bytes > self._limits.max_unread:
            self._disconnect_slow_consumer(transport)
        else:
            self._hold(data)
            self._admission.unread_output.add(self, len(data))

    def _hold(self, data: bytes) -> None:
        """Append bytes to the output that is not passed to the transport yet."""
        held = self._held_output
        if held and len(held[-1]) + len(data) <= MAX_WRITE_BYTES:
            held[-1] += data
        else:
            view = memoryview(data)
            held.extend(bytearray(view[i : i + MAX_WRITE_BYTES]) for i in range(0, len(data), MAX_WRITE_BYTES))
        self._held_bytes += len(data)

    @property
    def has_held_output(self) -> bool:
        """True if output waits until the client has read earlier output."""
        return len(self._held_output) > 0

    def _write_held_output(self, transport: asyncio.Transport) -> None:
        """Pass held output to the transport until the client has to read it."""
        held = self._held_output
        while held and not self.write_blocked and not transport.is_closing():
            part = held.popleft()
            self._held_bytes -= len(part)
            transport.write(part)

    def _disconnect_slow_consumer(self, transport: asyncio.Transport) -> None:
        """Send an error and close the connection.

        Abort it after `SLOW_CONSUMER_GRACE_S` if the client has not read the error.
        """
        limit = self._limits.max_unread
        reason = (
            f"slow consumer: the client left more than {limit} bytes of messages unread, so the connection is closed"
        )
        self._hold(replies.error(RequestRejected(Code.TOO_MANY, reason)))
        self.closed = True  # nothing is sent after the error
        self.finish()
        self.handler.on_disconnect(self)
        peer = transport.get_extra_info("peername")
        log_limited("warning", "slow consumer disconnected", peer=peer, unsent_bytes=self.unread_bytes, reason=reason)
        asyncio.get_running_loop().call_later(SLOW_CONSUMER_GRACE_S, self.abort)

    def abort_slow_consumer(self, reason: str) -> None:
        """Close the connection at once, because the client does not read. Its unread bytes are dropped."""
        if self._transport is not None:
            peer = self._transport.get_extra_info("peername")
            log_limited(
                "warning", "slow consumer disconnected", peer=peer, unsent_bytes=self.unread_bytes, reason=reason
            )
        self.abort()

    @property
    def unread_bytes(self) -> int:
        """Bytes of output of the connection that the client has not read."""
        if self._transport is None:
            return 0
        encrypted_bytes = 0 if self._encrypted_output is None else self._encrypted_output.unread_bytes
        return self._held_bytes + self._transport.get_write_buffer_size() + encrypted_bytes

    @property
    def blocked_bytes(self) -> int:
        """Bytes of output that the client has not read, and of the memory of queued commands, which may wait for the client."""
        size = self.unread_bytes
        for items, _, item_bytes in self.input_queue:
            size += item_bytes if isinstance(items, UnsplitLines) else COMMAND_FACTOR * item_bytes
        return size

    # -- flow control -------------------------------------------------------------------------------------

    def pause_input(self) -> None:
        """Stop reading until `resume_input`, because too many bytes are queued."""
        self.input_paused = True
        self._update_reading()

    def resume_input(self) -> None:
        """Resume reading after `pause_input`."""
        self.input_paused = False
        self._update_reading()

    def stop_reading(self) -> None:
        """Accept no further input."""
        self.closing = True
        self._update_reading()

    @property
    def reading_is_paused(self) -> bool:
        """True if reading from the client is paused, and will be resumed."""
        return (
            self.input_paused or self.write_blocked or self._postponed_lines is not None or bool(self._postponed_input)
        )

    def _update_reading(self) -> None:
        """Pause or resume reading from the transport according to the current state. Repeated calls are harmless."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._lingers_until:  # the input is discarded
            self._transport.resume_reading()
        elif self.reading_is_paused or self.closing:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # -- the end ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Send all messages and close the connection gracefully: half-close first, then linger, that is, discard input.

        Closing a connection with unread input would make the kernel reset it, and the client could lose the last messages.
        """
        if self.deferred:
            self.flush_deferred()
        self.closing = True
        transport = self._transport
        if transport is None or transport.is_closing() or self._is_ending:
            return
        self._is_ending, self._writable = True, None
        if self._held_output:  # `resume_writing` continues
            self._update_reading()
        else:
            self._end_output(transport)

    def _end_output(self, transport: asyncio.Transport) -> None:
        """Half-close the connection and linger, or close it, because all messages were passed to the transport."""
        if self._eof or not transport.can_write_eof():  # TLS has no half-close, and discards input when it is closed
            self._close(transport)
            return
        loop = asyncio.get_running_loop()
        self._lingers_until = loop.time() + LINGER_S
        with contextlib.suppress(OSError):  # the client has reset the connection, which the event loop will report
            transport.write_eof()
        loop.call_later(LINGER_IDLE_S, self._end_lingering, 0)  # 0 bytes discarded so far
        self._update_reading()

    def _close(self, transport: asyncio.Transport) -> None:
        """Close the transport when all messages that were passed to it are sent."""
        if self._encrypted_output is not None and self._encrypted_output.is_end_unread:
            transport.resume_reading()  # the input is discarded; otherwise the connection would stay open
        transport.close()

    def abort(self) -> None:
        """Close immediately, without sending pending messages."""
        if self._transport is not None:
            self._transport.abort()

    def _end_lingering(self, previously_discarded: int) -> None:
        """Close a lingering connection that is idle or whose time is over. Otherwise check again later.

        `previously_discarded` is `_discarded_bytes` at the last check. If it has not changed, the connection is idle.
        """
        transport, loop = self._transport, asyncio.get_running_loop()
        if transport is None or transport.is_closing():
            return
        if self._discarded_bytes == previously_discarded or loop.time() >= self._lingers_until:
            transport.close()
        else:
            loop.call_later(LINGER_IDLE_S, self._end_lingering, self._discarded_bytes)

    def _submit_end(self, error: RequestRejected | None = None) -> None:
        """Accept no further input, and close the connection after the replies to the commands that were read.

        `error`, if given, is sent after these replies.
        """
        if error is None:  # the client closed its sending side: there is no input to pause
            self.closing = True
        else:
            self.stop_reading()
        self._lines.clear()
        self._admission.partial_lines.discard(self)
        tail = [] if error is None else [error]
        self.handler.submit(self, [*tail, END_OF_INPUT], size=0)

    # -- incomplete and long lines ------------------------------------------------------------------------

    def drop_partial_line(self, rejection: RequestRejected) -> None:
        """Send `rejection` and close the connection, because its incomplete line exceeds a limit."""
        self._lines.clear()
        self._postponed_lines = None
        if self.state is ConnectionState.AUTHENTICATING:
            self._reject_connection(rejection)
        else:
            self._submit_end(rejection)

    def _reject_long_line(self, too_long: LineTooLong) -> None:
        """Submit the complete lines before a line that is too long. Then send an error and close the connection."""
        lines = too_long.lines
        if self.state is not READY:
            lines = self._process_opening_lines(iter(lines))
        if lines:
            # The bytes are not counted, because no further input of this connection is read.
            self._submit(lines, size=0)
        if not self.closing:  # an invalid opening line has closed it
            reason = f"the line is too long: a line has at most {self._limits.max_line} bytes"
            self._submit_end(RequestRejected(Code.LINE_TOO_LONG, reason))

    # -- authentication -----------------------------------------------------------------------------------

    def _receive_before_ready(self, data: bytes) -> bytes:
        """Authenticate the client if necessary, and reject a TLS client on a port without TLS.

        Return the bytes that are to be processed as lines: b"" if the client is rejected, or not authenticated yet.
        """
        if self._handshake is not None:
            data = self._authenticate(self._handshake, data)
        elif self.state is ConnectionState.AUTHENTICATING:  # rejected, but TLS may deliver input received earlier
            return b""
        if self.state is ConnectionState.AWAIT_HELLO and data.startswith(TLS_RECORD) and not self.closing:
            # The client sends no line end, so it would wait forever.
            self._submit_end(RequestRejected(Code.BAD_MESSAGE, "this server does not use TLS"))
        return b"" if self.closing else data

    def _authenticate(self, handshake: Handshake, data: bytes) -> bytes:
        """Pass received bytes to the handshake.

        Return all bytes received so far once the client is authenticated. Before that, and after a rejection, return
        b"".
        """
        outcome = handshake.receive(data)
        if outcome is None:
            self._admission.partial_lines.update(self, len(handshake.received), new=False)
            return b""
        if isinstance(outcome, Denial):
            self.reject_unauthenticated(outcome)
            return b""
        if outcome is not self.principal:  # the token takes precedence over the certificate
            self._set_principal(outcome)
            self.certificate = None
        handshake.stop_timer()
        self._handshake = None
        self.enter_state(ConnectionState.AWAIT_HELLO)
        self._admission.partial_lines.discard(self)
        return bytes(handshake.received)

    def reject_unauthenticated(self, denial: Denial = NO_HELLO) -> None:
        """Log why a client was not authenticated, send it the error of `denial` and close the connection."""
        if self._transport is not None and not self._transport.is_closing():
            peer = self._transport.get_extra_info("peername")
            log_limited("warning", "authentication failed", reason=denial.reason, peer=peer)
            self._reject_connection(denial.error)

    def _reject_connection(self, error: RequestRejected) -> None:
        """Send an error and close the connection.

        The error does not pass through the command handler, so an unavailable store does not delay the error. If too many
        rejected connections are open, the connection is closed without waiting until the client has read the error.
        """
        self.enter_state(ConnectionState.AUTHENTICATING)  # so that its loss is not reported to the handler
        self.closing = True
        if self._handshake is not None:
            self._handshake.stop_timer()
        if self._authenticator is not None:
            self._authenticator.count(error)
        self._admission.partial_lines.discard(self)
        self._write(replies.error(error))
        if not self._admission.crowded:
            self.finish()
        elif self._transport is not None:
            self._close(self._transport)

    @property
    def _owner(self) -> str | None:
        """The owner of the input before the connection is READY: its principal, or the address of the client."""
        return principal_name(self) or self._admission.address_of(self)

    def _set_principal(self, principal: Principal) -> None:
        """Set the principal of an authenticated client. With TLS, the turns of its long input are now those of the principal."""
        self.principal = principal
        tls = None if self._transport is None else self._transport.get_extra_info("ssl_object")
        if isinstance(tls, TurnsObject) and tls.turn is not None:
            tls.turn.owner = principal.name

    def reauthorize(self, principal: Principal) -> None:
        """Give the connection the permissions of `principal`."""
        self.principal = principal
        if self._handshake is not None and self._handshake.principal is not None:
            # The handshake returns this principal, that of the certificate, if the first line has no token.
            self._handshake.principal = principal

    def close_revoked(self) -> None:
        """Close the connection after the pending replies, because its principal has lost all permissions."""
        if not self.closing:
            self._submit_end(ACCESS_REVOKED)

    # -- hello --------------------------------------------------------------------------------------------

    def _process_opening_lines(self, lines: Iterator[bytes]) -> list[bytes]:
        """Process the first lines of a connection until it is READY.

        Return the remaining lines, which the handler executes. A connection becomes READY with an accepted `hello`, or
        if its first line is a command other than `hello`. After a rejected `hello`, every line except another `hello`
        is rejected. Many lines are processed in parts, so that other connections can run.
        """
        if self._postponed_lines is not None:
            self._postponed_lines = chain(self._postponed_lines, lines)
            return []
        # The replies to earlier lines are not written yet, and must precede those to these lines. The next `hello` may
        # select another handler, which does not wait for the earlier lines.
        if self.input_queue or self.outbox:
            self._postpone_opening_lines(lines)
            return []
        end = work_time.now() + OPENING_QUANTUM_S
        for line in lines:
            if line and not line.isspace() and self._process_opening_line(line):
                if self.state is READY:
                    return [*lines]  # the lines after the `hello`
                self.enter_state(READY)  # the first line is not a `hello`, so the handler executes it
                return [line, *lines]
            if self.closing:
                break
            if self.state is ConnectionState.HELLO_REJECTED and (self.input_queue or work_time.now() > end):
                self._postpone_opening_lines(lines)
                break
        return []

    def _postpone_opening_lines(self, lines: Iterator[bytes]) -> None:
        """Pause reading, and process `lines` in a later iteration of the event loop, after those of other connections."""
        self._postponed_lines = lines
        self._update_reading()
        is_rejected = self.state is ConnectionState.HELLO_REJECTED
        self._admission.opening_turns.postpone(self._owner, self._resume_opening, later=is_rejected)

    def _resume_opening(self) -> None:
        """Process the postponed lines, then resume reading."""
        postponed, self._postponed_lines = self._postponed_lines, None
        if postponed is None or self.closed or self.closing:
            return
        lines = self._process_opening_lines(postponed)
        if lines:
            self._submit(lines, sum(map(len, lines)))
        if self._postponed_lines is None and not self.closing:
            self._count_partial(len(self._lines.partial), new=True)  # it was not read meanwhile
        self._update_reading()

    def _process_opening_line(self, line: bytes) -> bool:
        """Submit or reject a `hello`. Reject an HTTP request, and any other line after a rejected `hello`.

        Return True if the connection is READY now. Also return True, without processing the line, if it is the first
        line and a command other than `hello`.
        """
        if self.state is ConnectionState.AWAIT_HELLO and is_http(line):
            self._submit_end(http_rejection())  # a web page may have sent the request: its body must not be executed
            return False
        hello = read_hello(line)
        if hello is None:
            if self.state is ConnectionState.AWAIT_HELLO:
                return True
            self._reject_line(line, unavailable(line, "hello was rejected; send another hello first"))
        elif self._authenticate_again(line):
            self._submit_hello(line, hello)
        return self.state is READY

    def _authenticate_again(self, hello: bytes) -> bool:
        """If a `hello` follows a rejected `hello`, authenticate it by its token, or without a token by the client's certificate.

        Return True if the connection may continue. Otherwise close the connection and return False.
        """
        if self.state is not ConnectionState.HELLO_REJECTED:
            return True  # the handshake has authenticated the first `hello`
        authenticator = self._authenticator
        if authenticator is None or self.principal is None:
            return True  # the server requires no authentication
        certificate = None if self._transport is None else certificate_name(self._transport.get_extra_info("peercert"))
        principal = authenticator.authenticate_again(hello, certificate)
        if principal is None:
            self.reject_unauthenticated(authenticator.denial(hello))
            return False
        self._set_principal(principal)
        self.certificate = certificate if hello_token(hello) is None else None  # a token takes precedence
        return True

    def _submit_hello(self, line: bytes, hello: Hello | RequestRejected) -> None:
        """Submit a `hello`, decoded from `line`, to the handler of its namespace. Reject an invalid `hello` or namespace."""
        handler = self.handler
        if isinstance(hello, Hello) and self._find_handler is not None:
            found = self._find_handler(hello.namespace)
            if isinstance(found, RequestRejected):
                hello = RequestRejected(found.code, found.message, ref=hello.ref)
            else:
                handler = found
        if isinstance(hello, RequestRejected):
            self.enter_state(ConnectionState.HELLO_REJECTED)
            self._reject_line(line, hello)
            return
        log.debug(
            "hello received", client=hello.client, namespace=hello.namespace, has_session=hello.session is not None
        )
        self.handler = handler
        self.enter_state(READY)
        handler.submit(self, [hello], size=0)

    def _reject_line(self, line: bytes, rejection: RequestRejected | None) -> None:
        """Send the error for a line that arrived before the connection is READY. Do nothing if `rejection` is None.

        A follower sends `unavailable` with the leader's address instead, because the leader may accept the line. An
        unknown namespace has no leader.
        """
        if rejection is None:
            return
        if not self.handler.is_leader and rejection.code != Code.UNKNOWN_NAMESPACE:
            self.handler.submit(self, [line], len(line))
            return
        # The error is sent immediately, because no other message is pending.
        if self._authenticator is not None:
            self._authenticator.count(rejection)
        self._write(replies.error(rejection))
