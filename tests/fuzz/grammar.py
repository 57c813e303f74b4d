"""Generates scenarios, lists of steps, from a seed. A scenario can be shrunk: without one step the others stay the same.

A line may contain `@7@` in place of an id: when it is sent, this is replaced by the eighth last id in a message.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzz.mutation import DEEP, mutate

Step = tuple[Any, ...]
"""The name of a method of `harness.Harness`, and its arguments."""

SLOTS = 7
"""The number of simultaneous connections."""

NAMES = ("a", "b", "c", "d", "ä/1", "a:b")
SUBTREES = ("ä/**", "ä/**", "ä/1/**", "b/**", "**")
NAMES_BELOW = ("ä/1", "ä/2", "ä/1/x", "ä/1/y")
OWNERS = ("T1", "T2", "T3", "T4")
REFS = ("r1", "r2", "r3", "r4", "r5", "r6")
SECRETS = ("secret-number-one", "secret-number-two", "secret-number-three")
PREFIXES = ("", "a", "ä", "b", "zzz")
TRACEPARENTS = (
    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "cc-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-0000000000000001-00",
)
NOTES = ("cron@host-7", "ä\U0001f510", "x" * 256)
MISSPELLED_FIELDS = (
    "somethingNew",
    "transactionTimout",
    "transaction_timeout",
    "queuetimeout",
    "Ref",
    "onDisconect",
    "resource",
)
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
"""Fields of a `hello` that is rejected, and must change nothing."""

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
    """Generates lines, most of them valid."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.extra = Random(repr(random.getstate()[1][:4]))
        """Decides features that were added later, so that the rest of a seed's lines stays the same."""
        self.kinds = Random(f"kinds of locks {random.getstate()[1][:4]}")
        """Decides where units and subtrees are used, likewise."""
        self.sent_requests: list[bytes] = []
        """Requests with a `ref`, which may be repeated."""

    def line(self) -> bytes:
        """Return a random line, without its newline."""
        random = self.random
        chance = random.random()
        if chance < 0.78:
            return self.with_namespace(self.with_ref(self.valid_line()))
        if chance < 0.95:
            return mutate(random, self.valid_line())
        return random.choice(NOISE)

    def valid_line(self) -> bytes:  # noqa: PLR0911 - one for each command
        """Return a line that is valid on its own."""
        random = self.random
        chance = random.random()
        if chance < 0.08 and self.sent_requests:
            return random.choice(self.sent_requests)
        if chance < 0.5:
            return self.request()
        if chance < 0.76:
            id_ = self.id()
            by_ref = self.extra.random() < 0.2
            return make_line("release", ref=self.extra.choice(REFS)) if by_ref else make_line("release", id=id_)
        if chance < 0.82:
            return make_line("extend", id=self.id(), transactionTimeout=random.choice((1, 20.5, 300, 20_000)))
        if chance < 0.88:
            return make_line("ping") if random.random() < 0.7 else b'{"command":"ping"}'
        if chance < 0.92:
            return self.inspect()
        if chance < 0.96:
            return make_line("watch", prefix=self.prefix())
        if chance < 0.99:
            return make_line("unwatch", prefix=self.prefix())
        if self.extra.random() < 0.4:
            return make_line("bye")
        if self.extra.random() < 0.3:
            return make_line("hello", **self.extra.choice(REJECTED))
        return make_line("hello", session=random.choice(SECRETS)) if random.random() < 0.5 else make_line("hello")

    def with_ref(self, line: bytes) -> bytes:
        """Return the line, sometimes with a `ref`: one of a few, so that requests have it, too."""
        if b'"ref"' in line or b'"request"' in line or self.extra.random() > 0.3:
            return line
        ref = self.extra.choice(REFS).encode()
        return _with_field(line, b'"ref": "%b"' % ref)

    def hello_options(self) -> dict[str, Any]:
        """Return optional fields of `hello` other than those of a session."""
        extra, more = self.extra, {}
        if extra.random() < 0.5:
            more["quiet"] = extra.random() < 0.8
        if extra.random() < 0.3:
            more |= {"protocol": 1, "client": "fuzz/1 ä"}
        if extra.random() < 0.2:
            more["ref"] = extra.choice(REFS)
        return more

    def with_namespace(self, line: bytes) -> bytes:
        """Return the line, sometimes with a namespace: the server's or, except in `hello`, an unknown one."""
        if self.extra.random() > 0.06:
            return line
        name = b"genie" if b"hello" in line or self.extra.random() < 0.6 else b"other"
        return _with_field(line, b'"namespace": "%b"' % name)

    def id(self) -> Any:
        """Return a placeholder for an id in a recent message, or an id that was in none."""
        random = self.random
        if random.random() < 0.06:
            return random.choice((0, -1, 7_000_000_000, 2**53 - 1))
        return IdPlaceholder(int(random.expovariate(0.3)))

    def request(self) -> bytes:
        random = self.random
        payload: dict[str, Any] = {}
        if random.random() < 0.1:
            names = random.sample(NAMES, random.randrange(1, 5))
            payload["anyOf"] = [self.lock(random.choice(("shared", "exclusive")), name) for name in names]
            payload["target"] = random.choice((1, 2, "3", 10))
            if random.random() < 0.5:
                payload["weights"] = [random.choice((1, "2", 3, 2**63 - 1)) for _ in names]
        else:
            count = random.choice((1, 1, 1, 1, 2, 2, 3, 6))
            modes = ("exclusive", "exclusive", "shared")
            payload["resources"] = [self.lock(random.choice(modes), random.choice(NAMES)) for _ in range(count)]
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
                payload[name or self.extra.choice(MISSPELLED_FIELDS)] = random.choice(values)
        if self.extra.random() < 0.1:
            payload["note"] = self.extra.choice(NOTES)
        if self.extra.random() < 0.1:
            payload["traceparent"] = self.extra.choice(TRACEPARENTS)
        if "resources" in payload and self.extra.random() < 0.03:
            payload["queueTimeout"] = 2_147_483_647
        line = make_line("request", **payload)
        if "ref" in payload:
            self.sent_requests = [*self.sent_requests[-5:], line]
        return line

    def inspect(self) -> bytes:
        random = self.random
        payload: dict[str, Any] = {}
        for name, values in (("resource", NAMES), ("transactionName", OWNERS), ("limit", (1, 2, 1000))):
            if random.random() < 0.3:
                payload[name] = random.choice(values)
        if "resource" in payload and self.kinds.random() < 0.3:
            payload["resource"] = self.kinds.choice(SUBTREES)
        return make_line("inspect", **payload)

    def lock(self, mode: str, name: str) -> str:
        """Return a lock in this mode on this name, or units of it, or sometimes on a subtree or a name below one."""
        kinds, chance = self.kinds, self.kinds.random()
        if chance < 0.12:
            return f"{mode}:{kinds.choice(SUBTREES)}"
        if chance < 0.35:
            name = kinds.choice(NAMES_BELOW)
        if kinds.random() < 0.2:
            limit = kinds.choice((1, 2, 3, 3, 5))
            return f"{kinds.choice((1, 1, 1, 2, limit, limit + 1))}/{limit}:{name}"
        return f"{mode}:{name}"

    def prefix(self) -> str:
        """Return a prefix to watch."""
        prefix = self.random.choice(PREFIXES)
        return self.kinds.choice(("ä/", "ä/1", "ä/1/", "ä/**")) if self.kinds.random() < 0.2 else prefix


def _with_field(line: bytes, field: bytes) -> bytes:
    """Return the line with a further field in its payload."""
    if not line.endswith(b"}}"):
        return line
    return line[:-2] + (b"" if line.endswith(b"{}}") else b", ") + field + b"}}"


class IdPlaceholder(int):
    """An id that is inserted when the line is sent."""


def make_line(command: str, **payload: Any) -> bytes:
    """Return a command as a line, without its newline."""
    placeholders = {name: value for name, value in payload.items() if isinstance(value, IdPlaceholder)}
    encodable = {**payload, **dict.fromkeys(placeholders, "@")}
    text = json.dumps({"command": command, "payload": encodable}, ensure_ascii=False)
    for value in placeholders.values():
        text = text.replace('"@"', f"@{int(value)}@", 1)
    return text.encode()


def make_scenario(seed: int, size: int) -> list[Step]:
    """Return the steps of a scenario in which about `size` lines are sent."""
    random = Random(seed)
    grammar = Grammar(random)
    durable = random.random() < 0.5
    steps: list[Step] = [("begin", durable, limits(random))]
    lines = 0
    while lines < size:
        slot, chance = random.randrange(SLOTS), random.random()
        if chance < 0.72:
            count = random.choice((1, 1, 1, 2, 3, 6))
            end = random.choice((b"\n", b"\n", b"\n", b"\r\n"))
            data = b"".join(grammar.line() + end for _ in range(count))
            if random.random() < 0.03:
                data += grammar.line()[: random.randrange(30)]  # the next line ends it
            cuts = sorted(random.random() for _ in range(random.choice((0, 0, 0, 0, 1, 2, 5))))
            steps.append(("send", slot, data, tuple(cuts)))
            lines += count
        elif chance < 0.76:
            secret, timeout_ms = random.choice(SECRETS), random.choice((1, 50, 10_000))
            keep_old = random.random() < 0.5
            rejected = [make_line("hello", **payload) for payload in grammar.extra.choices(REJECTED, k=2)]
            before = rejected[: grammar.extra.choice((0, 0, 0, 1, 2))]
            steps.append(("hello", slot, secret, timeout_ms, keep_old, grammar.hello_options(), tuple(before)))
            lines += 2
        elif chance < 0.82:
            steps.append(("send_invalid", slot, tuple(mutate(random, grammar.valid_line()) for _ in range(2))))
            lines += 2
        elif chance < 0.85:
            steps.append((random.choice(("half_close", "drop", "drop")), slot))
        elif chance < 0.88:
            steps.append((random.choice(("stall", "stall", "drain")), slot))
        elif chance < 0.91:
            steps.append(("wait", random.choice((0.3, 1, 1, 10, 60, 400, 7000))))
        elif chance < 0.93 and durable:
            steps.append(_store_fault(random))
        elif chance < 0.97:
            steps.append(("run_briefly",))
        else:
            steps.append(("settle",))
    return [*steps, ("end",)]


def _store_fault(random: Random) -> Step:
    """Return a step that makes the store slow or unavailable, or crashes the server."""
    return random.choice(
        (
            ("slow_store", random.choice((0.0, 0.002, 0.3))),
            ("store_outage", random.choice((100, 2600, 2600, 4000))),
            ("crash", random.random() < 0.5, random.random() < 0.5),
        )
    )


def limits(random: Random) -> dict[str, Any]:
    """Return settings of a server, some with limits so low that they are reached."""
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
