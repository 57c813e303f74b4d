"""TLS connections of a server: their handshakes, and long input, take turns.

A handshake takes about a millisecond of processor time. Thousands of clients may send the first message of a handshake at the
same moment, without authentication. OpenSSL accepts 100 KiB of certificates from a client, and decodes them all, which takes up
to 60 ms, before it verifies that a CA has signed them. So the bytes of a handshake are limited. After the handshake, 32 KiB of key updates take 10 ms, and 32 KiB of short records 2 ms. So
each iteration of the event loop has a limited time for them.

The end of a connection, or of its handshake, takes up to 40 µs. Thousands of clients may end theirs at the same moment, so the ends
take turns, too.

A server also counts the encrypted output that a client does not read.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

from genie.opening_turns import OpeningTurns, Owner

T = TypeVar("T")

CLOSED = "the client has closed the connection"

MAX_HANDSHAKE_BYTES: Final = 16 << 10
"""Bytes that a client may send in its handshake. A certificate with its chain has a few KiB. Decoding takes up to 0.7 ms for
each KiB."""
SHORT_INPUT_BYTES: Final = 1 << 10
"""Received bytes that are decrypted without a turn, as many as the commands of most clients have. Takes up to 0.3 ms."""
MAX_UNREAD_BYTES: Final = 64 << 10
"""Encrypted bytes of a connection beyond which nothing more is read from it after its turn, until they are decrypted."""

END_S: Final = 0.000_04
"""Assumed duration in seconds of the end of a connection or of a handshake, most of which follows in the next iteration of the event
loop."""

_TURN: ContextVar[Turn | None] = ContextVar("_TURN", default=None)
"""The turn of the connection whose handshake the current task runs."""


class TlsTurns:
    """The turns of the connections of a port. Handshakes don't delay clients that are connected."""

    def __init__(self) -> None:
        self.handshakes = OpeningTurns()
        self.input = OpeningTurns()
        self.ends = OpeningTurns()


class OutputHolder(Protocol):
    """The protocol of a TLS connection that holds output back while its writing is paused."""

    @property
    def has_held_output(self) -> bool:
        """True if output is held back."""

    def pause_writing(self) -> None:
        """Hold further output back."""

    def resume_writing(self) -> None:
        """Write output again."""


class Turn(asyncio.Protocol):
    """Gives the handshake and the input of a TLS connection their turns.

    The protocol of the transport before and after the handshake, until the caller sets another one.
    """

    def __init__(self, turns: TlsTurns, owner: Owner) -> None:
        self._turns = turns
        self.owner = owner
        """The owner of the input: the address of the client until it is authenticated, and then its principal."""
        self._transport: asyncio.Transport | None = None
        """The transport below TLS."""
        self.incoming: ssl.MemoryBIO | None = None
        """The received bytes that are not decrypted. None before the handshake."""
        self.is_handshake_complete = False
        self.handshake_bytes_left = MAX_HANDSHAKE_BYTES
        """Bytes that the client may still send in its handshake."""
        self.received = b""
        """Bytes that were received before the handshake began, or after its end."""
        self._has_turn = False
        """True while `_continue` executes the postponed step."""
        self._is_postponed = False
        """True if a step waits for a later iteration of the event loop."""
        self.is_paused = False
        """True if nothing is read from the client, because its input waits for its turn."""
        self._below_tls: BelowTls | None = None
        """The protocol of the transport since the handshake began."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport below TLS."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the cause does not matter
        """Break the reference cycles of the connection: the context of its transport refers to this turn."""
        self._transport = self._below_tls = None

    def data_received(self, data: bytes) -> None:
        """Keep the bytes that arrive outside of the handshake. Only those of a few reads: reading pauses."""
        self.received += data
        self._pause()

    def take_received(self) -> bytes:
        """Return the bytes that were received outside of the handshake, and forget them."""
        received, self.received = self.received, b""
        return received

    def process(self, step: Callable[[], T]) -> T:
        """Execute a step now, or raise `SSLWantReadError` and execute it in a later iteration of the event loop.

        Until then nothing is read from the client.
        """
        if self._has_turn:  # `_continue` has called this
            return step()
        turns = self._turns.input if self.is_handshake_complete else self._turns.handshakes
        if turns.has_time and not self._is_postponed:
            self.resume()
            return turns.run(step)
        if not self._is_postponed:
            self._is_postponed = True
            turns.postpone(self.owner, self._continue)
        self._pause()
        raise ssl.SSLWantReadError

    def _continue(self) -> None:
        """Execute the postponed step, because it is its turn."""
        transport = self._transport
        self._is_postponed = False
        if transport is None or transport.is_closing():
            return
        self._has_turn = True
        try:
            # The TLS protocol of the event loop continues with the input that it has.
            cast("asyncio.BufferedProtocol", transport.get_protocol()).buffer_updated(0)
        finally:
            self._has_turn = False
        # Otherwise the client has to read its messages first. Then its input is decrypted, and reading is resumed.
        if self.incoming is not None and self.incoming.pending <= MAX_UNREAD_BYTES:
            self.resume()

    def _pause(self) -> None:
        self.is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read from the client again, if reading has been paused for a turn."""
        if self.is_paused and self._transport is not None:
            self.is_paused = False
            self._transport.resume_reading()

    def insert_below_tls(self) -> None:
        """Insert a `BelowTls` between the transport and the TLS protocol of the event loop, if there is none yet."""
        transport = self._transport
        if self._below_tls is None and transport is not None:
            self._below_tls = BelowTls(transport, cast("asyncio.BufferedProtocol", transport.get_protocol()), self)
            transport.set_protocol(self._below_tls)

    def end(self, step: Callable[[], object]) -> bool:
        """End the connection or its handshake with `step`, now or in a later iteration of the event loop.

        Return whether `step` was executed now.
        """
        ends, counted_step = self._turns.ends, partial(self._end_and_count, step)
        if not ends.has_time:
            ends.postpone(self.owner, counted_step)
            return False
        ends.run(counted_step)
        return True

    def _end_and_count(self, step: Callable[[], object]) -> None:
        step()
        self._turns.ends.spend(END_S)

    def track_output(self, protocol: OutputHolder, high_bytes: int) -> BelowTls:
        """Pause the writing of `protocol` while the client leaves more than `high_bytes` of encrypted output unread.

        `protocol` is the protocol of the TLS connection. Called after the handshake.
        """
        assert self._transport is not None  # noqa: S101 - set before the handshake
        assert self._below_tls is not None  # noqa: S101 - set when the handshake began
        self._transport.set_write_buffer_limits(high=high_bytes)
        self._below_tls.protocol = protocol
        return self._below_tls


class BelowTls(asyncio.BufferedProtocol):
    """The protocol between the TLS protocol of the event loop and the transport below it.

    It gives the end of the connection its turn. And it counts the output that is encrypted, and that the client has not read. The
    TLS protocol does not count it: as soon as a little of it is read, it passes all further output on to the transport, and resumes
    the writing. So this protocol pauses and resumes it, too.
    """

    def __init__(self, transport: asyncio.Transport, tls: asyncio.BufferedProtocol, turn: Turn) -> None:
        self._transport = transport
        """The transport below TLS."""
        self._tls = tls
        """The TLS protocol of the event loop."""
        self._turn = turn
        self.protocol: OutputHolder | None = None
        """The protocol of the TLS connection, whose writing is paused, too. None if its output is not counted."""
        self.is_paused = False
        """True if the client has left much output unread. The TLS protocol must not resume the writing meanwhile."""
        self.is_end_unread = False
        """True if the client has ended the connection while its input was not read. Then the TLS protocol of asyncio closes the
        connection only after its input is read again."""

    @property
    def unread_bytes(self) -> int:
        """Encrypted bytes that the client has not read."""
        return self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """Make the TLS protocol keep further output, and pause the writing."""
        self.is_paused = True
        self._tls.pause_writing()
        if self.protocol is not None:
            self.protocol.pause_writing()

    def resume_writing(self) -> None:
        """Let the TLS protocol pass its output on. If that is not too much again, resume the writing."""
        self.is_paused = False
        self._tls.resume_writing()
        if self.protocol is not None and not self.is_paused:
            self.protocol.resume_writing()

    def get_buffer(self, sizehint: int) -> Any:
        """Return the buffer of the TLS protocol."""
        return self._tls.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Pass the event on to the TLS protocol."""
        self._tls.buffer_updated(nbytes)

    def eof_received(self) -> bool:
        """Pass the event on to the TLS protocol if it is its turn.

        Return True if the connection stays open, until its turn or because the TLS protocol has unread input.
        """
        if self._turn.end(self._receive_eof):
            return self.is_end_unread
        return True

    def _receive_eof(self) -> None:
        """Pass the end of the input on to the TLS protocol, and close the connection unless its input is unread.

        From then on, the TLS protocol drops further output. So a connection that has some is closed at once.
        """
        if self.protocol is not None and self.protocol.has_held_output:
            self._transport.abort()
            return
        self.is_end_unread = self._tls.eof_received() is True
        if not self.is_end_unread:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass the event on to the TLS protocol, during the handshake when it is its turn.

        After the handshake at once: otherwise the TLS protocol could write to the closed transport, which is an error.
        """
        if self._turn.is_handshake_complete:
            self._lose(exc)
        else:
            self._turn.end(partial(self._lose, exc))

    def _lose(self, exc: Exception | None) -> None:
        """Pass the loss of the connection on to the TLS protocol."""
        self._tls.connection_lost(exc)
        self._turn.connection_lost(exc)


class TurnsObject(ssl.SSLObject):
    """The TLS object of a connection that takes turns."""

    turn: Turn | None
    """None if the connection was not accepted with `accept_tls`."""
    incoming: ssl.MemoryBIO

    def do_handshake(self) -> None:
        """Continue the handshake if it is its turn. Raises ConnectionError if the client has sent too many bytes."""
        if self.turn is None:
            super().do_handshake()
        else:
            self.turn.insert_below_tls()
            self.turn.process(partial(self._continue_handshake, self.turn))
            self.turn.is_handshake_complete = True

    def _continue_handshake(self, turn: Turn) -> None:
        """Let OpenSSL read what the client may still send in its handshake. Commands may follow it."""
        received = self.incoming.read()
        allowed, rest = received[: turn.handshake_bytes_left], received[turn.handshake_bytes_left :]
        turn.handshake_bytes_left -= len(allowed)
        self.incoming.write(allowed)
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            if rest:
                raise ConnectionError(
                    f"the client sent more than {MAX_HANDSHAKE_BYTES} bytes, such as very many certificates"
                ) from None
            raise
        self.incoming.write(rest)

    def getpeercert(self, binary_form: bool = False) -> Any:
        """Return the certificate of the client. Raises ConnectionError if a name in it is not UTF-8."""
        try:
            return super().getpeercert(binary_form)
        except UnicodeDecodeError:
            raise ConnectionError("the client presented a certificate with a name that is not UTF-8") from None

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        """Decrypt input. Long input raises `SSLWantReadError` if it is not its turn."""
        turn = self.turn
        if turn is None or (self.incoming.pending <= SHORT_INPUT_BYTES and not turn.is_paused):
            return super().read(len, buffer)
        return turn.process(partial(super().read, len, buffer))

    def unwrap(self) -> None:
        """End the connection. This also decrypts the rest of the input, so long input waits for its turn."""
        if self.turn is None or self.incoming.pending <= SHORT_INPUT_BYTES:
            super().unwrap()
        else:
            self.turn.process(super().unwrap)


class TurnsContext(ssl.SSLContext):
    """Creates a `TurnsObject` for each connection."""

    sslobject_class = TurnsObject

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        """Create the TLS object of a connection, with the bytes that were received before."""
        tls = super().wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(tls, TurnsObject)  # noqa: S101 - `sslobject_class`
        turn = _TURN.get()
        tls.turn, tls.incoming = turn, incoming
        if turn is not None:
            turn.incoming = incoming
            incoming.write(turn.take_received())
        return tls


async def accept_tls(
    sock: socket.socket,
    context: ssl.SSLContext,
    turns: TlsTurns,
    make_protocol: Callable[[], asyncio.Protocol],
    *,
    handshake_timeout_s: float,
    shutdown_timeout_s: float,
) -> None:
    """Run the TLS handshake of an accepted connection, and then connect it with a new protocol.

    The handshake, and input after it, take turns if `context` is a `TurnsContext`. Raises OSError, such as
    `ssl.SSLError`, if the handshake fails.
    """
    peer = sock.getpeername()
    loop, turn = asyncio.get_running_loop(), Turn(turns, owner=peer[0] if peer else "")
    _TURN.set(turn)
    plain, _ = await loop.connect_accepted_socket(lambda: turn, sock)
    if plain.is_closing():  # the client has closed the connection
        raise ConnectionResetError(CLOSED)
    try:
        transport = await loop.start_tls(
            plain,
            turn,
            context,
            server_side=True,
            ssl_handshake_timeout=handshake_timeout_s,
            ssl_shutdown_timeout=shutdown_timeout_s,
        )
    except BaseException:
        plain.abort()
        raise
    if transport is None or transport.is_closing() or plain.is_closing():
        raise ConnectionResetError(CLOSED)
    protocol = make_protocol()
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    if turn.received:  # input that followed the handshake
        protocol.data_received(turn.take_received())
        turn.resume()
