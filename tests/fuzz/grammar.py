"""What a world does: a list of steps, from a seed alone. So a step can be left out, and the rest is still the same.

A line names a request that somebody was told of as `@7@`: the eighth last of them, when the line is said.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzz.mutation import DEEP, damaged

Step = tuple[Any, ...]
"""The name of a method of `stage.Stage`, and its arguments."""

SLOTS = 7
"""Connections at once."""

NAMES = ("a", "b", "c", "d", "ä/1", "a:b")
OWNERS = ("T1", "T2", "T3", "T4")
REFS = ("r1", "r2", "r3", "r4", "r5", "r6")
SECRETS = ("secret-number-one", "secret-number-two", "secret-number-three")
PREFIXES = ("", "a", "ä", "b", "zzz")
NOTES = ("cron@host-7", "ä\U0001f510", "x" * 256)
NEAR = ("somethingNew", "transactionTimout", "transaction_timeout", "queuetimeout", "Ref", "onDisconect", "resource")
"""Fields that no `request` has."""
REJECTED = (
    {"protocol": 2},
    {"protocol": 1.5},
    {"protocol": 0, "session": SECRETS[0]},
    {"sesion": SECRETS[0]},
    {"quiet": "yes"},
    {"namespace": "other"},
    {"session": "short"},
)
"""Of a `hello` that leaves nothing behind."""

NOISE = (
    *(
        b"",
        b"\r",
        b" \t",
        b"null",
        b"[]",
        b"{}",
        b"hello",
        b'"ping"',
        b"\xff\xfe",
        b'{"command":7}',
        b'{"command":"fly"}',
    ),
    *(b'{"command":"ping"', b'{"command":"request"}', b'{"command":"release","payload":[]}', b"NaN", b"\x00" * 30),
    *(
        b"GET / HTTP/1.1",
        b"POST /x HTTP/1.0",
        b"Host: here",
        b"x" * 900,
        b'{"command":"ping","payload":' + DEEP[3] + b"}",
    ),
    *(b'{"command":"request","payload":{"resources":' + deep + b"}}" for deep in DEEP[:3]),
)


class Grammar:
    """Lines, mostly good ones."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.apart = Random(repr(random.getstate()[1][:4]))
        """For what was thought of later: the lines of a seed are the same but for that."""
        self.said: list[bytes] = []
        """Requests with a `ref`, to be said again."""

    def line(self) -> bytes:
        """Any line, without its end."""
        random = self.random
        chance = random.random()
        if chance < 0.78:
            return self.within(self.named(self.good()))
        if chance < 0.95:
            return damaged(random, self.good())
        return random.choice(NOISE)

    def good(self) -> bytes:  # noqa: PLR0911 - one for each command
        """A line that is right in itself."""
        random = self.random
        chance = random.random()
        if chance < 0.08 and self.said:
            return random.choice(self.said)
        if chance < 0.5:
            return self.request()
        if chance < 0.76:
            id_ = self.id()
            by_ref = self.apart.random() < 0.2
            return said("release", ref=self.apart.choice(REFS)) if by_ref else said("release", id=id_)
        if chance < 0.82:
            return said("extend", id=self.id(), transactionTimeout=random.choice((1, 20.5, 300, 20_000)))
        if chance < 0.88:
            return said("ping") if random.random() < 0.7 else b'{"command":"ping"}'
        if chance < 0.92:
            return self.inspect()
        if chance < 0.96:
            return said("watch", prefix=random.choice(PREFIXES))
        if chance < 0.99:
            return said("unwatch", prefix=random.choice(PREFIXES))
        if self.apart.random() < 0.4:
            return said("bye")
        if self.apart.random() < 0.3:
            return said("hello", **self.apart.choice(REJECTED))
        return said("hello", session=random.choice(SECRETS)) if random.random() < 0.5 else said("hello")

    def named(self, line: bytes) -> bytes:
        """The line, now and then with a `ref`: few, so that they are also those of requests."""
        if b'"ref"' in line or b'"request"' in line or self.apart.random() > 0.3:
            return line
        ref = self.apart.choice(REFS).encode()
        return _with(line, b'"ref": "%b"' % ref)

    def more_of_hello(self) -> dict[str, Any]:
        """Fields beside those of a session."""
        apart, more = self.apart, {}
        if apart.random() < 0.5:
            more["quiet"] = apart.random() < 0.8
        if apart.random() < 0.3:
            more |= {"protocol": 1, "client": "fuzz/1 ä"}
        if apart.random() < 0.2:
            more["ref"] = apart.choice(REFS)
        return more

    def within(self, line: bytes) -> bytes:
        """The line, now and then with a namespace: the server's, or, but for `hello`, another."""
        if self.apart.random() > 0.06:
            return line
        name = b"genie" if b"hello" in line or self.apart.random() < 0.6 else b"other"
        return _with(line, b'"namespace": "%b"' % name)

    def id(self) -> Any:
        """One that was told, as a place to be filled in; or one that never was."""
        random = self.random
        if random.random() < 0.06:
            return random.choice((0, -1, 7_000_000_000, 2**53 - 1))
        return Place(int(random.expovariate(0.3)))

    def request(self) -> bytes:
        random = self.random
        payload: dict[str, Any] = {}
        if random.random() < 0.1:
            names = random.sample(NAMES, random.randrange(1, 5))
            payload["anyOf"] = [f"{random.choice(('shared', 'exclusive'))}:{name}" for name in names]
            payload["target"] = random.choice((1, 2, "3", 10))
            if random.random() < 0.5:
                payload["weights"] = [random.choice((1, "2", 3, 2**63 - 1)) for _ in names]
        else:
            many = random.choice((1, 1, 1, 1, 2, 2, 3, 6))
            modes = ("exclusive", "exclusive", "shared")
            payload["resources"] = [f"{random.choice(modes)}:{random.choice(NAMES)}" for _ in range(many)]
        for chance, name, values in (
            (0.5, "transactionName", (*OWNERS, None)),
            (0.6, "queueTimeout", (0, 0, 0.5, 5, 40, 2000, 20_000)),
            (0.5, "transactionTimeout", (1, 1.5, 10, 100, 5000, 20_000)),
            (0.2, "priority", (-1, 0, 0.5, 1, 2**31)),
            (0.4, "ref", REFS),
            (0.25, "onDisconnect", ("release", "release", "keep")),
            (0.03, "", (1, [], None)),
        ):
            if random.random() < chance:
                payload[name or self.apart.choice(NEAR)] = random.choice(values)
        if self.apart.random() < 0.1:
            payload["note"] = self.apart.choice(NOTES)
        if "resources" in payload and self.apart.random() < 0.03:
            payload["queueTimeout"] = 2_147_483_647
        line = said("request", **payload)
        if "ref" in payload:
            self.said = [*self.said[-5:], line]
        return line

    def inspect(self) -> bytes:
        random = self.random
        payload: dict[str, Any] = {}
        for name, values in (
            ("resource", NAMES),
            ("transactionName", OWNERS),
            ("limit", (1, 2, 1000)),
        ):
            if random.random() < 0.3:
                payload[name] = random.choice(values)
        return said("inspect", **payload)


def _with(line: bytes, field: bytes) -> bytes:
    """A line with one more field."""
    if not line.endswith(b"}}"):
        return line
    return line[:-2] + (b"" if line.endswith(b"{}}") else b", ") + field + b"}}"


class Place(int):
    """An id that is filled in when the line is said."""


def said(command: str, **payload: Any) -> bytes:
    """A line."""
    places = {name: value for name, value in payload.items() if isinstance(value, Place)}
    text = json.dumps({"command": command, "payload": {**payload, **dict.fromkeys(places, "@")}}, ensure_ascii=False)
    for value in places.values():
        text = text.replace('"@"', f"@{int(value)}@", 1)
    return text.encode()


def plan(seed: int, size: int) -> list[Step]:
    """The steps of a world, in which about `size` lines are said."""
    random = Random(seed)
    grammar = Grammar(random)
    durable = random.random() < 0.5
    steps: list[Step] = [("begin", durable, limits(random))]
    lines = 0
    while lines < size:
        slot, chance = random.randrange(SLOTS), random.random()
        if chance < 0.72:
            many = random.choice((1, 1, 1, 2, 3, 6))
            end = random.choice((b"\n", b"\n", b"\n", b"\r\n"))
            data = b"".join(grammar.line() + end for _ in range(many))
            if random.random() < 0.03:
                data += grammar.line()[: random.randrange(30)]  # the next line ends it
            cuts = sorted(random.random() for _ in range(random.choice((0, 0, 0, 0, 1, 2, 5))))
            steps.append(("say", slot, data, tuple(cuts)))
            lines += many
        elif chance < 0.76:
            secret, timeout_ms, again = random.choice(SECRETS), random.choice((1, 50, 10_000)), random.random() < 0.5
            wrong = [said("hello", **payload) for payload in grammar.apart.choices(REJECTED, k=2)]
            before = wrong[: grammar.apart.choice((0, 0, 0, 1, 2))]
            steps.append(("hello", slot, secret, timeout_ms, again, grammar.more_of_hello(), tuple(before)))
            lines += 2
        elif chance < 0.82:
            steps.append(("wrong_lines", slot, tuple(damaged(random, grammar.good()) for _ in range(2))))
            lines += 2
        elif chance < 0.85:
            steps.append((random.choice(("half_close", "drop", "drop")), slot))
        elif chance < 0.88:
            steps.append((random.choice(("stall", "stall", "drain")), slot))
        elif chance < 0.91:
            steps.append(("wait", random.choice((0.3, 1, 1, 10, 60, 400, 7000))))
        elif chance < 0.93 and durable:
            steps.append(_bad_day(random))
        elif chance < 0.97:
            steps.append(("turn",))
        else:
            steps.append(("settle",))
    return [*steps, ("end",)]


def _bad_day(random: Random) -> Step:
    """Something of the store, or of the process."""
    return random.choice(
        (
            ("slow", random.choice((0.0, 0.002, 0.3))),
            ("away", random.choice((100, 2600, 2600, 4000))),
            ("crash", random.random() < 0.5, random.random() < 0.5),
        )
    )


def limits(random: Random) -> dict[str, Any]:
    """Settings of a server: some limits are so low that they are reached."""
    low = {
        "max_line": 700,
        "max_connections": 6,
        "max_connections_per_address": 6,
        "max_requests_per_connection": 4,
        "max_requests_per_session": 4,
        "max_locks": 9,
        "max_queue": 6,
        "max_pending": 1500,
        "max_unread": 1500,
    }
    share = random.choice((0.0, 0.25, 0.5))
    return {name: value for name, value in low.items() if random.random() < share}
