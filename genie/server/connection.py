"""What one client is told: gathered while a batch is under way, sent when it is stored, and no more of it than is read."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Final, cast

import structlog

from genie.access import Principal
from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.protocol.commands import Hello, Within, http_refused, is_http, read_hello
from genie.protocol.fields import hello_token
from genie.protocol.framing import SHORTEST, Lines, LineTooLong, UnsplitLines
from genie.server.auth import GONE, HELLO_LINE, NO_HELLO, Denial
from genie.server.rejections import AWAY, refusal
from genie.server.sessions import Session
from genie.tls import name_of

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.server.auth import Door
    from genie.server.follower import Desk
    from genie.server.listener import Registry

log = structlog.get_logger()

CUT_S = 5.0
"""How long a client that has left too much unread is given to read it after all, and why it is cut off."""


LINGER_S = 5.0
"""Seconds for which a connection that is being closed discards what its client still sends, at most."""
LINGER_BYTES = 64 << 20
"""Bytes that it discards at most."""
LINGER_IDLE_S = 1.0
"""Seconds without a byte after which it is closed."""


class Outlet(asyncio.Protocol):
    """The side of a connection that writes; reading waits for it where the client does not keep up."""

    __slots__ = (
        "_behind",
        "_eof",
        "_lingered",
        "_lingers_until",
        "_settings",
        "_transport",
        "closed",
        "ending",
        "late",
        "out",
        "paused",
        "shown",
        "urgent",
    )

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._transport: asyncio.Transport | None = None
        self.out: list[bytes] = []
        """What the batch under way has to tell this client."""
        self.urgent = False
        """Some of that answers it, or is about its requests. The rest is what it watches."""
        self.late: list[bytes] = []
        """What it watches and has still to be told, from batches that are stored."""
        self.shown = 0
        """Bytes of what it watches, in `out` and `late`."""
        self.ending = False
        """Nothing more is executed; what was read is answered."""
        self._eof = False
        """The client has sent everything."""
        self._lingers_until = 0.0
        """Until when (event loop's clock) the client's bytes are discarded. 0: they are not."""
        self._lingered = 0
        """Bytes that were discarded."""
        self.closed = False
        self._behind = False
        """The client leaves answers unread."""
        self.paused = False
        """Too many of its commands wait for their turn."""

    def gone(self) -> None:
        """Nobody is there any more, as far as those are concerned who carry out what was said."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send all that the batch has told this client, in one write."""
        self.urgent = False
        if self.late:
            self.late += self.out
            self.out.clear()
            self.flush_late()
        else:
            data = b"".join(self.out)
            self.out.clear()
            self._write(data)
        self.shown = 0

    def postpone(self) -> None:
        """The batch has told this client only of what it watches: that goes with the next answer, or a little later."""
        self.late += self.out
        self.out.clear()

    def flush_late(self) -> None:
        """Send what it watches."""
        data = b"".join(self.late)
        self.late.clear()
        self.shown -= len(data)
        self._write(data)

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if not data or self.closed or transport is None or self._lingers_until:
            return
        if self._behind and transport.get_write_buffer_size() > self._settings.max_unread:
            self._cut(transport)  # asked before writing: who reads may be told much at once
        else:
            transport.write(data)

    def _cut(self, transport: asyncio.Transport) -> None:
        """The client leaves too much unread: that is the last thing it is told, if it reads on before long."""
        why = f"{self._settings.max_unread} bytes wait to be read, and more: the connection ends here"
        transport.write(replies.error(RequestRejected(Code.TOO_MANY, why)))
        self.closed = True
        self.finish()
        self.gone()
        log.warning("cut off", peer=transport.get_extra_info("peername"), unread=transport.get_write_buffer_size())
        asyncio.get_running_loop().call_later(CUT_S, transport.abort)

    @property
    def unread(self) -> int:
        """Bytes that wait for the client to read them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def finish(self) -> None:
        """Send everything, then close, and discard for a moment what the client still sends.

        Bytes that nothing reads would make the kernel reset the connection, and the last messages would be lost.
        """
        if self.late:
            self.flush_late()
        self.ending = True
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
        self._read_on()

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
        if self._lingers_until and self._lingered > LINGER_BYTES and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read nothing for now: too much waits for the store."""
        self.paused = True
        self._read_on()

    def resume(self) -> None:
        """Go on reading."""
        self.paused = False
        self._read_on()

    @property
    def reading_is_paused(self) -> bool:
        """Whether the server reads nothing from the client now, but will again."""
        return self.paused or self._behind

    def stop_reading(self) -> None:
        """Take no more commands from this client."""
        self.ending = True
        self._read_on()

    def pause_writing(self) -> None:
        """The client does not read its answers: read no more of its commands."""
        self._behind = True
        self._read_on()

    def resume_writing(self) -> None:
        """It has read enough of them."""
        self._behind = False
        self._read_on()

    def _read_on(self) -> None:
        """Read, unless there is a reason not to. (Both calls may be repeated.)"""
        if self._transport is None or self._transport.is_closing():
            return
        if self._lingers_until:
            self._transport.resume_reading()
        elif self._behind or self.paused or self.ending:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


# -- One client's connection: bytes to commands, messages to bytes, and no more memory than it is allowed --------

KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", 15),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 30_000),
        )
        if hasattr(socket, name)
    ),
]
"""A client whose machine vanished without a word is missed after half a minute (the usual two hours would leave the
locks that end with its connection held), and so is one that does not acknowledge what it is sent."""


TLS_RECORD = b"\x16\x03"
"""How a client begins that wants TLS. No line ever ends what it says."""


class ConnectionState(Enum):
    """How far a connection has come with `hello`."""

    AWAIT_HELLO = "await-hello"
    """Its first command decides: `hello`, or any other where no session, namespace or token is needed."""
    HELLO_REJECTED = "hello-rejected"
    """Nothing but another `hello` is accepted: what follows would be without the session that was asked for."""
    READY = "ready"
    """Its commands go to the desk of its namespace."""
    DETACHED = "detached"
    """Its session has ended, or is another connection's: nothing more of what it sent is executed."""


OPENING_S = 0.0005
"""Seconds for which a connection judges lines after a rejected `hello`, before others are read in between."""

READY: Final = ConnectionState.READY
DETACHED: Final = ConnectionState.DETACHED
"""Names of the module, since looking a member up on its class takes three times as long: they are asked for in each read."""


class Hangup:
    """In place of a command: the client will send nothing more, or must not. It gets its answers, then the end."""


HANGUP = Hangup()

Item = bytes | RequestRejected | Hangup | Hello | Within
"""What a connection submits: a line, an error to be sent in its place, the end, or a command that was decoded."""

Input = Sequence[Item] | UnsplitLines
"""What it hands in at once."""

Queued = tuple[Iterator[Item], int, int]
"""What is left of an input that waits for its turn: how many items (many, where that is not known yet), and its bytes."""

Inbox = deque[Queued]


class Connection(Outlet):
    """Reads lines, hands commands to a desk in the order they came, and writes what it is told.

    `registry` holds every open connection, and says whether it has a place for this. `door` says who comes in; None:
    everybody. `desks` gives the desk of the namespace in a `hello` (None: it names none), or why there is none; `desk` is
    for connections without a `hello`.
    """

    __slots__ = (
        "_bell",
        "_desks",
        "_door",
        "_first",
        "_lines",
        "_partial",
        "_registry",
        "_unopened",
        "ahead",
        "busy_until",
        "certificate",
        "desk",
        "inbox",
        "overran_until",
        "principal",
        "session",
        "state",
    )

    def __init__(
        self,
        desk: Desk,
        settings: Settings,
        registry: Registry,
        door: Door | None = None,
        desks: Callable[[str | None], Desk | RequestRejected] | None = None,
    ) -> None:
        super().__init__(settings)
        self._desks = desks
        self.desk = desk
        """Who takes what it brings. Another, when the server changes its role."""
        self._registry = registry
        self._lines = Lines(settings.max_line)
        self._door = door
        self._first: bytearray | None = None
        """What has come of the first line, as long as that decides who this is."""
        self._bell: asyncio.TimerHandle | None = None
        """Rings when a stranger has taken too long."""
        self.certificate: str | None = None
        """The name in the certificate that the client has shown, and that was verified; None where a token counts."""
        self.principal: Principal | None = None
        """Who this is, and what it may do. None: nobody was asked, and everybody may do everything."""
        self.session = Session(self)
        self.state = ConnectionState.AWAIT_HELLO
        self._unopened: Iterator[bytes] | None = None
        """Lines after a rejected `hello` that were not judged yet. The connection is paused until they are."""
        self.inbox: Inbox = deque()
        """Its queued commands, read by read."""
        self._partial = 0
        """Bytes of its incomplete line, as they are counted over all connections."""
        self.ahead = 0
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
        full = self._registry.enter(self, peer[0] if peer else "")
        if full is not None:
            self._turn_away(RequestRejected(Code.TOO_MANY, full))
        elif self._door is not None:
            self._ask(self._door)
        for level, option, value in KEEPALIVE:
            transport.get_extra_info("socket").setsockopt(level, option, value)
        named = {} if self.certificate is None else {"certificate": self.certificate}
        log.debug("connection", peer=peer, open=len(self._registry), **named)

    def data_received(self, data: bytes) -> None:
        """Hand the lines that the bytes complete to the desk. They are decoded when their turn comes."""
        if self.ending:
            self._discard(data)
            return
        if self.state is not READY:
            data = self._authenticated(data)
        try:
            fed = lines = self._lines.feed(data)
        except LineTooLong as too_long:
            self._refuse_long_line(too_long)
            return
        if type(lines) is list and len(data) < SHORTEST * len(lines):
            lines = [line for line in lines if line]  # blank ones may be many, and would fill the memory
        if lines and self.state is not READY:
            lines = self._open(iter(lines))
        if lines:
            self.desk.submit(self, lines, len(data))
        if self._lines.rest or self._partial:
            self._count_partial_line(new=type(fed) is not list or bool(fed))

    def _count_partial_line(self, *, new: bool) -> None:
        """Count the line that is not complete yet; `new`: since the last read. Last, since it may close the connection."""
        if not self.ending:
            self._partial = len(self._lines.rest)
            self._registry.partial_lines.update(self, self._partial, new=new)

    def _authenticated(self, data: bytes) -> bytes:
        """Return what a connection that is not open yet has sent, as far as it may be read: nothing before its token."""
        if self._first is not None:
            data = self._let_in(data)
        if self.state is ConnectionState.AWAIT_HELLO and data.startswith(TLS_RECORD) and not self.ending:
            self._hang_up(RequestRejected(Code.BAD_MESSAGE, "this server speaks no TLS"))  # it would wait for a line
        return b"" if self.ending else data

    def _refuse_long_line(self, too_long: LineTooLong) -> None:
        """Execute the lines before it, then say that it is too long, and close."""
        lines = too_long.lines if self.state is READY else self._open(iter(too_long.lines))
        if lines:
            self.desk.submit(self, lines, 0)
        if not self.ending:
            limit = self._settings.max_line
            self._hang_up(RequestRejected(Code.LINE_TOO_LONG, f"a line has at most {limit} bytes"))

    def drop_partial_line(self, why: RequestRejected) -> None:
        """Close the connection, whose incomplete line is beyond a bound."""
        self._lines.clear()
        if self._first is None:
            self._hang_up(why)
        else:
            self._turn_away(why)

    def eof_received(self) -> bool:
        """The client has said all (as `printf … | nc` does) and still listens, which with TLS it can't."""
        self._eof = True
        if self._lingers_until:
            return False
        if self._first is None or self.principal is not None:
            if not self.ending:
                self._hang_up()
        elif self._first:
            self.refuse()
        else:
            self.finish()
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - how it ended changes nothing
        """Nobody is there any more."""
        self.closed = True
        self._registry.leave(self)
        if self._bell is not None:
            self._bell.cancel()
        if self._first is None:
            self.gone()

    def gone(self) -> None:
        """Tell the desk that nobody is there any more."""
        self.desk.gone(self)

    def refuse(self, denial: Denial = NO_HELLO) -> None:
        """Reject and close a connection that was not authenticated. No desk has heard of it."""
        if self._transport is not None and not self._transport.is_closing():
            peer = self._transport.get_extra_info("peername")
            log.warning("authentication failed", reason=denial.reason, peer=peer)
            self._turn_away(denial.error)

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
            if not self.ending:
                self._hang_up(GONE)
        else:
            self.principal = principal

    # -- inside -------------------------------------------------------------------------------------------

    def _turn_away(self, why: RequestRejected) -> None:
        """Say why, and close. No desk hears of it, so that it need not wait for the store."""
        self._first = bytearray()
        if self._bell is not None:
            self._bell.cancel()
        if self._door is not None:
            self._door.refused(why)
        self._registry.partial_lines.forget(self)
        self._write(replies.error(why))
        if not self._registry.crowded:
            self.finish()
        elif self._transport is not None:
            self._transport.close()

    def _ask(self, entrance: Door) -> None:
        """Ask who this is: a certificate may have said so already, and a token may say otherwise."""
        access = entrance.access
        if self.certificate is not None:
            self.principal = access.by_certificate(self.certificate)
        if access.tokens or (self.principal is None and not access.open):
            self._first = bytearray()
            if self.principal is None:
                self._bell = entrance.ring(self.refuse)

    def _let_in(self, data: bytes) -> bytes:
        """Wait for the first line, and see by it who this is; returns what is to be carried out, with that line.

        No more is kept of anybody than such a line and one read, and a stranger's line may have less bytes than others.
        """
        first, entrance = self._first, self._door
        assert first is not None, "this is done once"  # noqa: S101
        assert entrance is not None, "somebody asks who comes"  # noqa: S101
        searched = len(first)
        first += data if first else data.lstrip()
        end = first.find(b"\n", searched)
        line = first if end < 0 else first[:end]
        principal = self.principal
        too_long = len(line) - line.endswith(b"\r") > (HELLO_LINE if principal is None else self._settings.max_line)
        if end < 0 and not too_long and not first.startswith(TLS_RECORD):
            self._registry.partial_lines.update(self, len(first), new=False)
            return b""
        if end >= 0 and not too_long:
            principal = entrance.enters(bytes(line), principal)
        if principal is None:
            self.refuse(entrance.denial(bytes(line)) if end >= 0 and not too_long else NO_HELLO)
            return b""
        if principal is not self.principal:
            self.principal, self.certificate = principal, None
        self._first = None
        self._registry.partial_lines.forget(self)
        if self._bell is not None:
            self._bell.cancel()
        return bytes(first)

    def _open(self, lines: Iterator[bytes]) -> list[bytes]:
        """Handle lines until one opens the connection: an accepted `hello`, or any other command first. Return the rest.

        Each `hello` is judged by itself, and goes to the desk of its namespace. Many lines after a rejected one are
        judged a few at a time.
        """
        if self._unopened is not None:
            self._unopened = chain(self._unopened, lines)
            return []
        end = time.monotonic() + OPENING_S
        for line in lines:
            if line and not line.isspace() and self._opens(line):
                return [*lines] if self.state is READY else self._first_command(line, lines)
            if self.ending:
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
            self._hang_up(http_refused())  # a page may have sent it: nothing of it is executed
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
        if unopened is None or self.closed or self.ending:
            return
        lines = self._open(unopened)
        if lines:
            self.desk.submit(self, lines, sum(map(len, lines)))
        if self._unopened is None and not self.ahead:
            self.resume()

    def _authenticates(self, hello: bytes) -> bool:
        """Whether a line with a `hello` may be judged: what came with an earlier one that was rejected does not count."""
        door = self._door
        if self.state is not ConnectionState.HELLO_REJECTED or self.principal is None or door is None:
            return True
        certificate = None if self._transport is None else name_of(self._transport.get_extra_info("peercert"))
        principal = door.enters(hello, None if certificate is None else door.access.by_certificate(certificate))
        if principal is None:
            self.refuse(door.denial(hello))
            return False
        self.principal = principal
        self.certificate = None if hello_token(hello) is not None else certificate
        return True

    def _greet(self, line: bytes, hello: Hello | RequestRejected) -> None:
        """Submit a `hello`, which was decoded from `line`, to the desk of its namespace, or answer why it is rejected."""
        desk = self.desk
        if isinstance(hello, Hello) and self._desks is not None:
            found = self._desks(hello.namespace)
            if isinstance(found, RequestRejected):
                hello = RequestRejected(found.code, found.message, ref=hello.ref)
            else:
                desk = found
        if isinstance(hello, RequestRejected):
            self.state = ConnectionState.HELLO_REJECTED
            self._reject(line, hello)
            return
        log.debug("hello received", client=hello.client, namespace=hello.namespace, session=hello.session is not None)
        self.desk, self.state = desk, ConnectionState.READY
        desk.submit(self, [hello], 0)

    def _reject(self, line: bytes, rejected: RequestRejected | None) -> None:
        """Answer a line that is not executed because of `hello`, at once: no desk has anything to send here yet.

        A follower answers `unavailable` instead, with the leader, which could accept the line.
        """
        if rejected is None:
            return
        if not self.desk.leads and rejected.code != Code.UNKNOWN_NAMESPACE:
            self.desk.submit(self, [line], 0)
            return
        if self._door is not None:
            self._door.refused(rejected)
        self._write(replies.error(rejected))

    def _hang_up(
        self,
        last: RequestRejected | None = None,
    ) -> None:
        """Read no more: `last` is sent when what was read is answered, and that is the end."""
        if last is None:
            self.ending = True
        else:
            self.stop_reading()
        self._lines.clear()
        self._registry.partial_lines.forget(self)
        tail = [] if last is None else [last]
        self.desk.submit(self, [*tail, HANGUP], 0)
