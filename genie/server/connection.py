"""One TCP connection: bytes to lines, lines to the command handler, messages to bytes; flow control in both directions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, cast

import structlog

from genie.access import Principal
from genie.errors import Code, RequestRejected
from genie.net import enable_keepalive
from genie.protocol import replies
from genie.protocol.commands import Hello, http_rejection, is_http, read_hello
from genie.protocol.diagnostics import hello_token
from genie.protocol.framing import MIN_COMMAND_BYTES, LineReader, LineTooLong
from genie.server.auth import ACCESS_REVOKED, NO_HELLO, TLS_RECORD, Denial
from genie.server.peer import END_OF_INPUT, READY, CommandHandler, ConnectionState, Peer
from genie.server.rejections import unavailable
from genie.tls import certificate_name

if TYPE_CHECKING:
    from genie.config import Limits
    from genie.server.auth import Authenticator, Handshake
    from genie.server.listener import AdmissionControl

log = structlog.get_logger()

SLOW_CONSUMER_GRACE_S = 5.0
"""Seconds for which a slow consumer may still read its output buffer, with the error at its end, before it is aborted."""

LINGER_S = 5.0
"""Maximum time in seconds for which a closing connection lingers: it discards what the client still sends."""
MAX_LINGER_BYTES = 64 << 20
"""Maximum bytes that a lingering connection discards."""
LINGER_IDLE_S = 1.0
"""Seconds without input after which a lingering connection is closed."""

OPENING_QUANTUM_S = 0.0005
"""Seconds after which a connection with many lines after a rejected `hello` lets other connections run."""

KEEPALIVE_IDLE_S = 15
"""TCP keepalive starts after this idle time. A client whose machine vanished is disconnected after half a minute; with the
kernel's default of two hours, the locks that end with its connection would stay held."""

FindHandler = Callable[[str | None], CommandHandler | RequestRejected]
"""Returns the handler of the namespace that a `hello` names (None: the default), or the error if there is none."""


class Connection(Peer, asyncio.Protocol):
    """Reads lines, submits commands to a handler in order, and writes messages.

    `handler` is for connections without a `hello`, `find_handler` for those with one. `admission` counts open connections
    and rejects those beyond the limits. Without `authenticator` no authentication is required.
    """

    __slots__ = (
        "_admission",
        "_authenticator",
        "_eof",
        "_find_handler",
        "_handshake",
        "_limits",
        "_lines",
        "_lingered",
        "_lingers_until",
        "_partial_bytes",
        "_postponed_lines",
        "_transport",
        "_write_blocked",
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
        self.handler = handler
        """What commands are submitted to. Replaced when the server's role changes."""
        self._find_handler = find_handler
        self._limits = limits
        self._admission = admission
        self._authenticator = authenticator
        self._handshake: Handshake | None = None
        """The authentication in progress, which the first line completes."""
        self.certificate: str | None = None
        """The name in the client's verified certificate; None if a token authenticated the client."""
        self._transport: asyncio.Transport | None = None
        self._lines = LineReader(limits.max_line)
        self._postponed_lines: Iterator[bytes] | None = None
        """Lines after a rejected `hello` that are not processed yet. Reading is paused until they are."""
        self._partial_bytes = 0
        """Bytes of the incomplete line that `admission` counts for this connection."""
        self._write_blocked = False
        """The transport's write buffer is full: the client does not read."""
        self._eof = False
        """The client closed its sending side."""
        self._lingers_until = 0.0
        """Event-loop time until which the closing connection lingers; 0 if it does not linger."""
        self._lingered = 0
        """Bytes discarded while it lingered."""

    # -- the event loop's callbacks -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection and start its authentication, or reject it if it exceeds the limits."""
        self._transport = cast("asyncio.Transport", transport)
        self.certificate = certificate_name(transport.get_extra_info("peercert"))
        peer = transport.get_extra_info("peername")
        over_limit = self._admission.admit(self, peer[0] if peer else "")
        if over_limit is not None:
            self._reject_connection(RequestRejected(Code.TOO_MANY, over_limit))
        elif self._authenticator is not None:
            self._start_authentication(self._authenticator)
        enable_keepalive(transport.get_extra_info("socket"), idle_s=KEEPALIVE_IDLE_S)
        optional_fields = {} if self.certificate is None else {"certificate": self.certificate}
        log.debug("connection opened", peer=peer, open=len(self._admission), **optional_fields)

    def data_received(self, data: bytes) -> None:
        """Submit the lines that the received bytes complete. They are decoded when they are executed."""
        if self.closing:
            self._discard(data)
            return
        if self.state is not READY:
            data = self._receive_before_ready(data)
        try:
            completed = lines = self._lines.feed(data)
        except LineTooLong as too_long:
            self._reject_long_line(too_long)
            return
        if type(lines) is list and len(data) < MIN_COMMAND_BYTES * len(lines):
            lines = [line for line in lines if line]  # a flood of blank lines would fill the memory
        if lines and self.state is not READY:
            lines = self._process_opening_lines(iter(lines))
        if lines:
            self.handler.submit(self, lines, len(data))
        if self._lines.partial or self._partial_bytes:
            self._count_partial_line(new=type(completed) is not list or bool(completed))

    def eof_received(self) -> bool:
        """Close after the replies to what was read. Return whether the transport stays open for them.

        It does not with TLS, which has no half-close. `printf … | nc` half-closes.
        """
        self._eof = True
        if self._lingers_until:
            return False
        if self.state is not ConnectionState.AUTHENTICATING or self.principal is not None:
            if not self.closing:
                self._submit_end()
        elif self._handshake is not None and self._handshake.received:
            self.reject_unauthenticated()
        else:
            self.finish()
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason makes no difference
        """Release what is bound to the lost connection."""
        self.closed = True
        self._admission.leave(self)
        if self._handshake is not None:
            self._handshake.stop_timer()
        if self.state is not ConnectionState.AUTHENTICATING:
            self.handler.on_disconnect(self)

    def pause_writing(self) -> None:
        """Back pressure: the client does not read its messages, so stop reading its commands."""
        self._write_blocked = True
        self._update_reading()

    def resume_writing(self) -> None:
        """Resume reading commands, because the client has read enough messages."""
        self._write_blocked = False
        self._update_reading()

    # -- output -------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        """Write to the client, or disconnect a slow consumer whose output buffer limit is exceeded."""
        transport = self._transport
        if not data or self.closed or transport is None or self._lingers_until:
            return
        if self._write_blocked and transport.get_write_buffer_size() > self._limits.max_unread:
            self._disconnect_slow_consumer(transport)  # checked before the write: a single batch may exceed the limit
        else:
            transport.write(data)

    def _disconnect_slow_consumer(self, transport: asyncio.Transport) -> None:
        """Send the error, close the connection, and abort it if the client does not read that in time."""
        why = f"slow consumer: more than {self._limits.max_unread} bytes are unread, so the connection is closed"
        transport.write(replies.error(RequestRejected(Code.TOO_MANY, why)))
        self.closed = True
        self.finish()
        self.handler.on_disconnect(self)
        peer = transport.get_extra_info("peername")
        log.warning("slow consumer disconnected", peer=peer, unsent_bytes=transport.get_write_buffer_size())
        asyncio.get_running_loop().call_later(SLOW_CONSUMER_GRACE_S, transport.abort)

    @property
    def unread_bytes(self) -> int:
        """Bytes in the transport's write buffer: the client has not read them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

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
        """Whether reading from the client is paused, and will be resumed."""
        return self.input_paused or self._write_blocked or self._postponed_lines is not None

    def _update_reading(self) -> None:
        """Pause or resume the transport according to the current state. Both calls may be repeated."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._lingers_until:
            self._transport.resume_reading()
        elif self.reading_is_paused or self.closing:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # -- the end ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Send all messages, then close after lingering: what the client still sends is discarded for a while.

        If the connection were closed with unread input, the kernel would reset it and the last messages could be lost.
        """
        if self.deferred:
            self.flush_deferred()
        self.closing = True
        transport = self._transport
        if transport is None or transport.is_closing() or self._lingers_until:
            return
        if self._eof or not transport.can_write_eof():  # TLS has no half-close, and discards input when it is closed
            transport.close()
            return
        loop = asyncio.get_running_loop()
        self._lingers_until = loop.time() + LINGER_S
        transport.write_eof()
        loop.call_later(LINGER_IDLE_S, self._end_lingering, 0)
        self._update_reading()

    def abort(self) -> None:
        """Close immediately, without sending pending messages."""
        if self._transport is not None:
            self._transport.abort()

    def _end_lingering(self, lingered: int) -> None:
        """Close a lingering connection, unless the client sent something since the last call, which counted `lingered` bytes."""
        transport, loop = self._transport, asyncio.get_running_loop()
        if transport is None or transport.is_closing():
            return
        if self._lingered == lingered or loop.time() >= self._lingers_until:
            transport.close()
        else:
            loop.call_later(LINGER_IDLE_S, self._end_lingering, self._lingered)

    def _discard(self, data: bytes) -> None:
        """Discard input of a connection that is being closed."""
        self._lingered += len(data)
        if self._lingers_until and self._lingered > MAX_LINGER_BYTES and self._transport is not None:
            self._transport.close()

    def _submit_end(self, error: RequestRejected | None = None) -> None:
        """Accept no further input. After the replies to what was read, send `error`, if any, and close."""
        if error is None:
            self.closing = True
        else:
            self.stop_reading()
        self._lines.clear()
        self._admission.partial_lines.discard(self)
        tail = [] if error is None else [error]
        self.handler.submit(self, [*tail, END_OF_INPUT], 0)

    # -- incomplete and long lines ------------------------------------------------------------------------

    def _count_partial_line(self, *, new: bool) -> None:
        """Count the bytes of the incomplete line; `new`: it started in this read. May close the connection."""
        if not self.closing:
            self._partial_bytes = len(self._lines.partial)
            self._admission.partial_lines.update(self, self._partial_bytes, new=new)

    def drop_partial_line(self, why: RequestRejected) -> None:
        """Send the error and close, because the incomplete line exceeds a limit."""
        self._lines.clear()
        if self.state is ConnectionState.AUTHENTICATING:
            self._reject_connection(why)
        else:
            self._submit_end(why)

    def _reject_long_line(self, too_long: LineTooLong) -> None:
        """Execute the lines before the one that is too long, then send the error and close."""
        lines = too_long.lines if self.state is READY else self._process_opening_lines(iter(too_long.lines))
        if lines:
            self.handler.submit(self, lines, 0)
        if not self.closing:
            limit = self._limits.max_line
            self._submit_end(
                RequestRejected(Code.LINE_TOO_LONG, f"the line is too long: a line has at most {limit} bytes")
            )

    # -- authentication -----------------------------------------------------------------------------------

    def _start_authentication(self, authenticator: Authenticator) -> None:
        """Authenticate the client by its certificate, or wait for a token in its first line."""
        self._handshake, self.principal = authenticator.begin(self.certificate, self._limits.max_line)
        if self._handshake is not None:
            self.enter_state(ConnectionState.AUTHENTICATING)
            if self.principal is None:
                self._handshake.start_timer(self.reject_unauthenticated)

    def _receive_before_ready(self, data: bytes) -> bytes:
        """Handle input of a connection that is not READY. Return the bytes that may be executed."""
        if self._handshake is not None:
            data = self._authenticate(self._handshake, data)
        if self.state is ConnectionState.AWAIT_HELLO and data.startswith(TLS_RECORD) and not self.closing:
            # The client sends no line end, so it would wait forever.
            self._submit_end(RequestRejected(Code.BAD_MESSAGE, "this server does not use TLS"))
        return b"" if self.closing else data

    def _authenticate(self, handshake: Handshake, data: bytes) -> bytes:
        """Add input to the authentication. Once the client is authenticated, return all bytes received so far, else none."""
        outcome = handshake.receive(data)
        if outcome is None:
            self._admission.partial_lines.update(self, len(handshake.received), new=False)
            return b""
        if isinstance(outcome, Denial):
            self.reject_unauthenticated(outcome)
            return b""
        if outcome is not self.principal:
            self.principal, self.certificate = outcome, None
        handshake.stop_timer()
        self._handshake = None
        self.enter_state(ConnectionState.AWAIT_HELLO)
        self._admission.partial_lines.discard(self)
        return bytes(handshake.received)

    def reject_unauthenticated(self, denial: Denial = NO_HELLO) -> None:
        """Reject and close a connection that was not authenticated."""
        if self._transport is not None and not self._transport.is_closing():
            peer = self._transport.get_extra_info("peername")
            log.warning("authentication failed", reason=denial.reason, peer=peer)
            self._reject_connection(denial.error)

    def _reject_connection(self, error: RequestRejected) -> None:
        """Send an error and close. No handler is used, so this does not wait for the store."""
        self.enter_state(ConnectionState.AUTHENTICATING)
        if self._handshake is not None:
            self._handshake.stop_timer()
        if self._authenticator is not None:
            self._authenticator.count(error)
        self._admission.partial_lines.discard(self)
        self._write(replies.error(error))
        if not self._admission.crowded:
            self.finish()
        elif self._transport is not None:
            self._transport.close()

    def reauthorize(self, principal: Principal | None) -> None:
        """Change the permissions to those of `principal`. None: revoke them all, and close after replying to what was read."""
        if principal is None and self.principal is not None:
            self.principal = Principal(self.principal.name, permissions=frozenset())
            if not self.closing:
                self._submit_end(ACCESS_REVOKED)
        else:
            self.principal = principal

    # -- hello --------------------------------------------------------------------------------------------

    def _process_opening_lines(self, lines: Iterator[bytes]) -> list[bytes]:
        """Process the first lines of a connection until it is READY. Return the lines after that, which are executed.

        A connection becomes READY with an accepted `hello`, or without one if its first line is another command. After
        a rejected `hello` every line but another `hello` is rejected. Many such lines are processed a few at a time, and
        not before those that a follower has queued: the next `hello` may be for another handler, and the replies must
        be in the order of the lines.
        """
        if self._postponed_lines is not None:
            self._postponed_lines = chain(self._postponed_lines, lines)
            return []
        if self.input_queue:
            self._postpone_opening_lines(lines)
            return []
        end = time.monotonic() + OPENING_QUANTUM_S
        for line in lines:
            if line and not line.isspace() and self._process_opening_line(line):
                if self.state is READY:
                    return [*lines]
                self.enter_state(READY)  # without a `hello`
                return [line, *lines]
            if self.closing:
                break
            if self.state is ConnectionState.HELLO_REJECTED and (self.input_queue or time.monotonic() > end):
                self._postpone_opening_lines(lines)
                break
        return []

    def _postpone_opening_lines(self, lines: Iterator[bytes]) -> None:
        """Pause reading, and process the lines after other connections were read."""
        self._postponed_lines = lines
        self._update_reading()
        asyncio.get_running_loop().call_soon(self._resume_opening)

    def _resume_opening(self) -> None:
        """Process the postponed lines, then resume reading."""
        postponed, self._postponed_lines = self._postponed_lines, None
        if postponed is None or self.closed or self.closing:
            return
        lines = self._process_opening_lines(postponed)
        if lines:
            self.handler.submit(self, lines, sum(map(len, lines)))
        self._update_reading()

    def _process_opening_line(self, line: bytes) -> bool:
        """Submit or reject a `hello`, or reject another line after a rejected one.

        Return True if the connection is READY now, or if this is a first command that is executed without a `hello`.
        """
        if self.state is ConnectionState.AWAIT_HELLO and is_http(line):
            self._submit_end(http_rejection())  # a web page may have sent it: execute nothing of it
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
        """Authenticate a `hello` after a rejected one, by its own credentials. Return False if that fails."""
        authenticator = self._authenticator
        if self.state is not ConnectionState.HELLO_REJECTED or self.principal is None or authenticator is None:
            return True
        certificate = None if self._transport is None else certificate_name(self._transport.get_extra_info("peercert"))
        principal = authenticator.authenticate_again(hello, certificate)
        if principal is None:
            self.reject_unauthenticated(authenticator.denial(hello))
            return False
        self.principal = principal
        self.certificate = None if hello_token(hello) is not None else certificate
        return True

    def _submit_hello(self, line: bytes, hello: Hello | RequestRejected) -> None:
        """Submit a `hello`, decoded from `line`, to the handler of its namespace; reject it if it or the namespace is wrong."""
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
        log.debug("hello received", client=hello.client, namespace=hello.namespace, session=hello.session is not None)
        self.handler = handler
        self.enter_state(READY)
        handler.submit(self, [hello], 0)

    def _reject_line(self, line: bytes, rejected: RequestRejected | None) -> None:
        """Send the error for a line before the connection is READY, immediately because no other message is pending.

        A follower sends `unavailable` with the address of the leader instead, which may accept the line.
        """
        if rejected is None:
            return
        if not self.handler.is_leader and rejected.code != Code.UNKNOWN_NAMESPACE:
            self.handler.submit(self, [line], 0)
            return
        if self._authenticator is not None:
            self._authenticator.count(rejected)
        self._write(replies.error(rejected))
