"""What one client is told: gathered while a batch is under way, sent when it is stored, and no more of it than is read."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Final, cast

import structlog

from genie.access import Principal
from genie.errors import Code, RequestRejected
from genie.net import enable_keepalive
from genie.protocol import replies
from genie.protocol.commands import Hello, Namespaced, http_rejection, is_http, read_hello
from genie.protocol.diagnostics import hello_token
from genie.protocol.framing import MIN_COMMAND_BYTES, LineReader, LineTooLong, UnsplitLines
from genie.server.auth import ACCESS_REVOKED, MAX_HELLO_BYTES, NO_HELLO, Denial
from genie.server.rejections import AWAY, refusal
from genie.server.sessions import Session
from genie.tls import name_of

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.server.auth import Authenticator
    from genie.server.follower import CommandHandler
    from genie.server.listener import AdmissionControl

log = structlog.get_logger()

SLOW_CONSUMER_GRACE_S = 5.0
"""How long a client that has left too much unread is given to read it after all, and why it is cut off."""


LINGER_S = 5.0
"""Seconds for which a connection that is being closed discards what its client still sends, at most."""
MAX_LINGER_BYTES = 64 << 20
"""Bytes that it discards at most."""
LINGER_IDLE_S = 1.0
"""Seconds without a byte after which it is closed."""


class Outlet(asyncio.Protocol):
    """The side of a connection that writes; reading waits for it where the client does not keep up."""

    __slots__ = (
        "_eof",
        "_lingered",
        "_lingers_until",
        "_settings",
        "_transport",
        "_write_blocked",
        "closed",
        "closing",
        "deferred",
        "has_reply",
        "outbox",
        "paused",
        "watch_bytes",
    )

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._transport: asyncio.Transport | None = None
        self.outbox: list[bytes] = []
        """What the batch under way has to tell this client."""
        self.has_reply = False
        """Some of that answers it, or is about its requests. The rest is what it watches."""
        self.deferred: list[bytes] = []
        """What it watches and has still to be told, from batches that are stored."""
        self.watch_bytes = 0
        """Bytes of what it watches, in `out` and `late`."""
        self.closing = False
        """Nothing more is executed; what was read is answered."""
        self._eof = False
        """The client has sent everything."""
        self._lingers_until = 0.0
        """Until when (event loop's clock) the client's bytes are discarded. 0: they are not."""
        self._lingered = 0
        """Bytes that were discarded."""
        self.closed = False
        self._write_blocked = False
        """The client leaves answers unread."""
        self.paused = False
        """Too many of its commands wait for their turn."""

    def gone(self) -> None:
        """Nobody is there any more, as far as those are concerned who carry out what was said."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send all that the batch has told this client, in one write."""
        self.has_reply = False
        if self.deferred:
            self.deferred += self.outbox
            self.outbox.clear()
            self.flush_deferred()
        else:
            data = b"".join(self.outbox)
            self.outbox.clear()
            self._write(data)
        self.watch_bytes = 0

    def defer(self) -> None:
        """The batch has told this client only of what it watches: that goes with the next answer, or a little later."""
        self.deferred += self.outbox
        self.outbox.clear()

    def flush_deferred(self) -> None:
        """Send what it watches."""
        data = b"".join(self.deferred)
        self.deferred.clear()
        self.watch_bytes -= len(data)
        self._write(data)

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if not data or self.closed or transport is None or self._lingers_until:
            return
        if self._write_blocked and transport.get_write_buffer_size() > self._settings.limits.max_unread:
            self._disconnect_slow_consumer(transport)  # asked before writing: who reads may be told much at once
        else:
            transport.write(data)

    def _disconnect_slow_consumer(self, transport: asyncio.Transport) -> None:
        """The client leaves too much unread: that is the last thing it is told, if it reads on before long."""
        why = f"{self._settings.limits.max_unread} bytes wait to be read, and more: the connection ends here"
        transport.write(replies.error(RequestRejected(Code.TOO_MANY, why)))
        self.closed = True
        self.finish()
        self.gone()
        log.warning("cut off", peer=transport.get_extra_info("peername"), unread=transport.get_write_buffer_size())
        asyncio.get_running_loop().call_later(SLOW_CONSUMER_GRACE_S, transport.abort)

    @property
    def unread(self) -> int:
        """Bytes that wait for the client to read them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def finish(self) -> None:
        """Send everything, then close, and discard for a moment what the client still sends.

        Bytes that nothing reads would make the kernel reset the connection, and the last messages would be lost.
        """
        if self.deferred:
            self.flush_deferred()
        self.closing = True
        transport = self._transport
        if transport is None or transport.is_closing() or self._lingers_until:
            return
        if self._eof or not transport.can_write_eof():  # TLS has no half-close: its close discards what comes by itself
            transport.close()
            return
        loop = asyncio.get_running_loop()
        self._lingers_until = loop.time() + LINGER_S
        transport.write_eof()
        loop.call_later(LINGER_IDLE_S, self._end_lingering, 0)
        self._update_reading()

    def _end_lingering(self, lingered: int) -> None:
        """Close, unless the client has sent more than `lingered` bytes, the number when this was last called."""
        transport, loop = self._transport, asyncio.get_running_loop()
        if transport is None or transport.is_closing():
            return
        if self._lingered == lingered or loop.time() >= self._lingers_until:
            transport.close()
        else:
            loop.call_later(LINGER_IDLE_S, self._end_lingering, self._lingered)

    def _discard(self, data: bytes) -> None:
        """Discard what the client sends after its connection was ended."""
        self._lingered += len(data)
        if self._lingers_until and self._lingered > MAX_LINGER_BYTES and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read nothing for now: too much waits for the store."""
        self.paused = True
        self._update_reading()

    def resume(self) -> None:
        """Go on reading."""
        self.paused = False
        self._update_reading()

    @property
    def reading_is_paused(self) -> bool:
        """Whether the server reads nothing from the client now, but will again."""
        return self.paused or self._write_blocked

    def stop_reading(self) -> None:
        """Take no more commands from this client."""
        self.closing = True
        self._update_reading()

    def pause_writing(self) -> None:
        """The client does not read its answers: read no more of its commands."""
        self._write_blocked = True
        self._update_reading()

    def resume_writing(self) -> None:
        """It has read enough of them."""
        self._write_blocked = False
        self._update_reading()

    def _update_reading(self) -> None:
        """Read, unless there is a reason not to. (Both calls may be repeated.)"""
        if self._transport is None or self._transport.is_closing():
            return
        if self._lingers_until:
            self._transport.resume_reading()
        elif self._write_blocked or self.paused or self.closing:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


# -- One client's connection: bytes to commands, messages to bytes, and no more memory than it is allowed --------

KEEPALIVE_IDLE_S = 15
"""A client whose machine vanished is disconnected after half a minute. The kernel's default of two hours
would keep the locks that end with its connection held."""


TLS_RECORD = b"\x16\x03"
"""How a client begins that wants TLS. No line ever ends what it says."""


class ConnectionState(Enum):
    """How far a connection has come with `hello`."""

    AWAIT_HELLO = "await-hello"
    """Its first command decides: `hello`, or any other where no session, namespace or token is needed."""
    HELLO_REJECTED = "hello-rejected"
    """Nothing but another `hello` is accepted: what follows would be without the session that was asked for."""
    READY = "ready"
    """Its commands go to the handler of its namespace."""
    DETACHED = "detached"
    """Its session has ended, or is another connection's: nothing more of what it sent is executed."""


OPENING_S = 0.0005
"""Seconds for which a connection judges lines after a rejected `hello`, before others are read in between."""

READY: Final = ConnectionState.READY
DETACHED: Final = ConnectionState.DETACHED
"""Names of the module, since looking a member up on its class takes three times as long: they are asked for in each read."""


class EndOfInput:
    """In place of a command: the client will send nothing more, or must not. It gets its answers, then the end."""


END_OF_INPUT = EndOfInput()

Item = bytes | RequestRejected | EndOfInput | Hello | Namespaced
"""What a connection submits: a line, an error to be sent in its place, the end, or a command that was decoded."""

Input = Sequence[Item] | UnsplitLines
"""What it hands in at once."""

Queued = tuple[Iterator[Item], int, int]
"""What is left of an input that waits for its turn: how many items (many, where that is not known yet), and its bytes."""

InputQueue = deque[Queued]


class Connection(Outlet):
    """Reads lines, hands commands to a handler in the order they came, and writes what it is told.

    `admission` holds every open connection, and says whether it has a place for this. `authenticator` says who comes in; None:
    everybody. `handlers` gives the handler of the namespace in a `hello` (None: it names none), or why there is none; `handler` is
    for connections without a `hello`.
    """

    __slots__ = (
        "_admission",
        "_auth_timer",
        "_authenticator",
        "_find_handler",
        "_hello_line",
        "_lines",
        "_partial",
        "_unopened",
        "busy_until",
        "certificate",
        "handler",
        "input_queue",
        "overran_until",
        "principal",
        "queued_bytes",
        "session",
        "state",
    )

    def __init__(
        self,
        handler: CommandHandler,
        settings: Settings,
        admission: AdmissionControl,
        authenticator: Authenticator | None = None,
        handlers: Callable[[str | None], CommandHandler | RequestRejected] | None = None,
    ) -> None:
        super().__init__(settings)
        self._find_handler = handlers
        self.handler = handler
        """Who takes what it brings. Another, when the server changes its role."""
        self._admission = admission
        self._lines = LineReader(settings.limits.max_line)
        self._authenticator = authenticator
        self._hello_line: bytearray | None = None
        """What has come of the first line, as long as that decides who this is."""
        self._auth_timer: asyncio.TimerHandle | None = None
        """Rings when a stranger has taken too long."""
        self.certificate: str | None = None
        """The name in the certificate that the client has shown, and that was verified; None where a token counts."""
        self.principal: Principal | None = None
        """Who this is, and what it may do. None: nobody was asked, and everybody may do everything."""
        self.session = Session(self)
        self.state = ConnectionState.AWAIT_HELLO
        self._unopened: Iterator[bytes] | None = None
        """Lines after a rejected `hello` that were not judged yet. The connection is paused until they are."""
        self.input_queue: InputQueue = deque()
        """Its queued commands, read by read."""
        self._partial = 0
        """Bytes of its incomplete line, as they are counted over all connections."""
        self.queued_bytes = 0
        """Bytes of its commands that wait for their turn."""
        self.busy_until = self.overran_until = 0.0
        """On the scheduler's clock: until when it runs after light connections, and until when the next turn beyond its
        quantum makes it do so."""

    # -- from the event loop ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection in, or refuse it when there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self.certificate = name_of(transport.get_extra_info("peercert"))
        peer = transport.get_extra_info("peername")
        full = self._admission.enter(self, peer[0] if peer else "")
        if full is not None:
            self._reject_connection(RequestRejected(Code.TOO_MANY, full))
        elif self._authenticator is not None:
            self._start_authentication(self._authenticator)
        enable_keepalive(transport.get_extra_info("socket"), idle_s=KEEPALIVE_IDLE_S)
        named = {} if self.certificate is None else {"certificate": self.certificate}
        log.debug("connection", peer=peer, open=len(self._admission), **named)

    def data_received(self, data: bytes) -> None:
        """Hand the lines that the bytes complete to the handler. They are decoded when their turn comes."""
        if self.closing:
            self._discard(data)
            return
        if self.state is not READY:
            data = self._authenticated(data)
        try:
            fed = lines = self._lines.feed(data)
        except LineTooLong as too_long:
            self._refuse_long_line(too_long)
            return
        if type(lines) is list and len(data) < MIN_COMMAND_BYTES * len(lines):
            lines = [line for line in lines if line]  # blank ones may be many, and would fill the memory
        if lines and self.state is not READY:
            lines = self._open(iter(lines))
        if lines:
            self.handler.submit(self, lines, len(data))
        if self._lines.partial or self._partial:
            self._count_partial_line(new=type(fed) is not list or bool(fed))

    def _count_partial_line(self, *, new: bool) -> None:
        """Count the line that is not complete yet; `new`: since the last read. Last, since it may close the connection."""
        if not self.closing:
            self._partial = len(self._lines.partial)
            self._admission.partial_lines.update(self, self._partial, new=new)

    def _authenticated(self, data: bytes) -> bytes:
        """Return what a connection that is not open yet has sent, as far as it may be read: nothing before its token."""
        if self._hello_line is not None:
            data = self._authenticate(data)
        if self.state is ConnectionState.AWAIT_HELLO and data.startswith(TLS_RECORD) and not self.closing:
            self._close_after(
                RequestRejected(Code.BAD_MESSAGE, "this server speaks no TLS")
            )  # it would wait for a line
        return b"" if self.closing else data

    def _refuse_long_line(self, too_long: LineTooLong) -> None:
        """Execute the lines before it, then say that it is too long, and close."""
        lines = too_long.lines if self.state is READY else self._open(iter(too_long.lines))
        if lines:
            self.handler.submit(self, lines, 0)
        if not self.closing:
            limit = self._settings.limits.max_line
            self._close_after(RequestRejected(Code.LINE_TOO_LONG, f"a line has at most {limit} bytes"))

    def drop_partial_line(self, why: RequestRejected) -> None:
        """Close the connection, whose incomplete line is beyond a bound."""
        self._lines.clear()
        if self._hello_line is None:
            self._close_after(why)
        else:
            self._reject_connection(why)

    def eof_received(self) -> bool:
        """The client has said all (as `printf … | nc` does) and still listens, which with TLS it can't."""
        self._eof = True
        if self._lingers_until:
            return False
        if self._hello_line is None or self.principal is not None:
            if not self.closing:
                self._close_after()
        elif self._hello_line:
            self.refuse()
        else:
            self.finish()
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - how it ended changes nothing
        """Nobody is there any more."""
        self.closed = True
        self._admission.leave(self)
        if self._auth_timer is not None:
            self._auth_timer.cancel()
        if self._hello_line is None:
            self.gone()

    def gone(self) -> None:
        """Tell the handler that nobody is there any more."""
        self.handler.gone(self)

    def refuse(self, denial: Denial = NO_HELLO) -> None:
        """Reject and close a connection that was not authenticated. No handler has heard of it."""
        if self._transport is not None and not self._transport.is_closing():
            peer = self._transport.get_extra_info("peername")
            log.warning("authentication failed", reason=denial.reason, peer=peer)
            self._reject_connection(denial.error)

    def unavailable(self, item: Item, why: str = AWAY) -> RequestRejected | None:
        """Return the answer to what this connection submitted where it can't be executed; None where there is none.

        After a `hello` the connection waits for another one.
        """
        if self.state is DETACHED:
            return None
        if isinstance(item, Hello):
            self.state = ConnectionState.HELLO_REJECTED
        return refusal(item, why)

    def revise(self, principal: Principal | None) -> None:
        """Go on with other rights. None: none, so this is the end, behind the answers to what was read."""
        if principal is None and self.principal is not None:
            self.principal = Principal(self.principal.name, rights=frozenset())
            if not self.closing:
                self._close_after(ACCESS_REVOKED)
        else:
            self.principal = principal

    # -- inside -------------------------------------------------------------------------------------------

    def _reject_connection(self, why: RequestRejected) -> None:
        """Say why, and close. No handler hears of it, so that it need not wait for the store."""
        self._hello_line = bytearray()
        if self._auth_timer is not None:
            self._auth_timer.cancel()
        if self._authenticator is not None:
            self._authenticator.refused(why)
        self._admission.partial_lines.forget(self)
        self._write(replies.error(why))
        if not self._admission.crowded:
            self.finish()
        elif self._transport is not None:
            self._transport.close()

    def _start_authentication(self, entrance: Authenticator) -> None:
        """Ask who this is: a certificate may have said so already, and a token may say otherwise."""
        access = entrance.access
        if self.certificate is not None:
            self.principal = access.by_certificate(self.certificate)
        if access.tokens or (self.principal is None and not access.open):
            self._hello_line = bytearray()
            if self.principal is None:
                self._auth_timer = entrance.start_auth_timer(self.refuse)

    def _authenticate(self, data: bytes) -> bytes:
        """Wait for the first line, and see by it who this is; returns what is to be carried out, with that line.

        No more is kept of anybody than such a line and one read, and a stranger's line may have less bytes than others.
        """
        first, entrance = self._hello_line, self._authenticator
        assert first is not None, "this is done once"  # noqa: S101
        assert entrance is not None, "somebody asks who comes"  # noqa: S101
        searched = len(first)
        first += data if first else data.lstrip()
        end = first.find(b"\n", searched)
        line = first if end < 0 else first[:end]
        principal = self.principal
        too_long = len(line) - line.endswith(b"\r") > (
            MAX_HELLO_BYTES if principal is None else self._settings.limits.max_line
        )
        if end < 0 and not too_long and not first.startswith(TLS_RECORD):
            self._admission.partial_lines.update(self, len(first), new=False)
            return b""
        if end >= 0 and not too_long:
            principal = entrance.authenticate(bytes(line), principal)
        if principal is None:
            self.refuse(entrance.denial(bytes(line)) if end >= 0 and not too_long else NO_HELLO)
            return b""
        if principal is not self.principal:
            self.principal, self.certificate = principal, None
        self._hello_line = None
        self._admission.partial_lines.forget(self)
        if self._auth_timer is not None:
            self._auth_timer.cancel()
        return bytes(first)

    def _open(self, lines: Iterator[bytes]) -> list[bytes]:
        """Handle lines until one opens the connection: an accepted `hello`, or any other command first. Return the rest.

        Each `hello` is judged by itself, and goes to the handler of its namespace. Many lines after a rejected one are
        judged a few at a time.
        """
        if self._unopened is not None:
            self._unopened = chain(self._unopened, lines)
            return []
        end = time.monotonic() + OPENING_S
        for line in lines:
            if line and not line.isspace() and self._opens(line):
                return [*lines] if self.state is READY else self._first_command(line, lines)
            if self.closing:
                break
            if self.state is ConnectionState.HELLO_REJECTED and time.monotonic() > end:
                self._unopened = lines
                self.pause()
                asyncio.get_running_loop().call_soon(self._open_more)
                break
        return []

    def _first_command(self, line: bytes, lines: Iterator[bytes]) -> list[bytes]:
        """Begin without a `hello`."""
        self.state = READY
        return [line, *lines]

    def _opens(self, line: bytes) -> bool:
        """Whether the connection is open with this line: a `hello` that was submitted, or a first command to be executed."""
        if self.state is ConnectionState.AWAIT_HELLO and is_http(line):
            self._close_after(http_rejection())  # a page may have sent it: nothing of it is executed
            return False
        hello = read_hello(line)
        if hello is None:
            if self.state is ConnectionState.AWAIT_HELLO:
                return True
            self._reject(line, refusal(line, "hello was rejected; it must be sent again first"))
        elif self._authenticates(line):
            self._greet(line, hello)
        return self.state is READY

    def _open_more(self) -> None:
        """Go on with the lines that were not judged yet."""
        unopened, self._unopened = self._unopened, None
        if unopened is None or self.closed or self.closing:
            return
        lines = self._open(unopened)
        if lines:
            self.handler.submit(self, lines, sum(map(len, lines)))
        if self._unopened is None and not self.queued_bytes:
            self.resume()

    def _authenticates(self, hello: bytes) -> bool:
        """Whether a line with a `hello` may be judged: what came with an earlier one that was rejected does not count."""
        authenticator = self._authenticator
        if self.state is not ConnectionState.HELLO_REJECTED or self.principal is None or authenticator is None:
            return True
        certificate = None if self._transport is None else name_of(self._transport.get_extra_info("peercert"))
        principal = authenticator.authenticate(
            hello, None if certificate is None else authenticator.access.by_certificate(certificate)
        )
        if principal is None:
            self.refuse(authenticator.denial(hello))
            return False
        self.principal = principal
        self.certificate = None if hello_token(hello) is not None else certificate
        return True

    def _greet(self, line: bytes, hello: Hello | RequestRejected) -> None:
        """Submit a `hello`, which was decoded from `line`, to the handler of its namespace, or answer why it is rejected."""
        handler = self.handler
        if isinstance(hello, Hello) and self._find_handler is not None:
            found = self._find_handler(hello.namespace)
            if isinstance(found, RequestRejected):
                hello = RequestRejected(found.code, found.message, ref=hello.ref)
            else:
                handler = found
        if isinstance(hello, RequestRejected):
            self.state = ConnectionState.HELLO_REJECTED
            self._reject(line, hello)
            return
        log.debug("hello received", client=hello.client, namespace=hello.namespace, session=hello.session is not None)
        self.handler, self.state = handler, ConnectionState.READY
        handler.submit(self, [hello], 0)

    def _reject(self, line: bytes, rejected: RequestRejected | None) -> None:
        """Answer a line that is not executed because of `hello`, at once: no handler has anything to send here yet.

        A follower answers `unavailable` instead, with the leader, which could accept the line.
        """
        if rejected is None:
            return
        if not self.handler.leads and rejected.code != Code.UNKNOWN_NAMESPACE:
            self.handler.submit(self, [line], 0)
            return
        if self._authenticator is not None:
            self._authenticator.refused(rejected)
        self._write(replies.error(rejected))

    def _close_after(
        self,
        last: RequestRejected | None = None,
    ) -> None:
        """Read no more: `last` is sent when what was read is answered, and that is the end."""
        if last is None:
            self.closing = True
        else:
            self.stop_reading()
        self._lines.clear()
        self._admission.partial_lines.forget(self)
        tail = [] if last is None else [last]
        self.handler.submit(self, [*tail, END_OF_INPUT], 0)
