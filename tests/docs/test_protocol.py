"""`protocol.md` is true: every example happens so, every number is the code's, nothing is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from matching import Bindings, Screen
from pages import Block, blocks, code, number, prose, table
from transcript import encode_line, execute, steps

from genie import lock_modes
from genie.config import Settings
from genie.core import Reason, Request, manager, view
from genie.core.special import MAX_COMPARED_NAMES, MAX_QUEUES, MAX_SEARCHED_LEVELS, MAX_WAITERS_BELOW
from genie.core.wait_queue import MAX_ARRIVAL_STEPS
from genie.errors import Code
from genie.protocol import commands, diagnostics, framing, limits, replies, resources
from genie.server import auth, connection, dispatcher, partial_lines, scheduler, sessions, unread_output, watches
from genie.server import sessions as session
from support.network.wire import Wire
from support.processes.servers import Genie, running_redis, running_server

PAGE = "protocol.md"
BLOCKS = blocks(PAGE)
EXAMPLES = [block for block in BLOCKS if block.language == "transcript"]
OF_A_FOLLOWER = [block for block in EXAMPLES if any(step.connection == "F" for step in steps(block))]
LEADER = "192.0.2.7:7077"
SETTINGS = Settings()


@pytest.fixture(scope="module")
def genie() -> Iterator[Genie]:
    with running_server() as server:
        yield server


@pytest.mark.parametrize("block", [block for block in EXAMPLES if block not in OF_A_FOLLOWER], ids=str)
async def test_a_server_behaves_as_in_the_example(block: Block, genie: Genie) -> None:
    assert steps(block)
    await execute(block, genie.address)


@pytest.mark.server
async def test_a_follower_replies_as_in_the_example() -> None:
    """Separate from the other examples, because `execute` needs a leader to release all locks."""
    (block,) = OF_A_FOLLOWER
    with running_redis() as redis, running_server(redis, advertise=LEADER), running_server(redis) as follower:
        wire, bindings = await Wire.connect(follower.address), Bindings()
        for step in steps(block):
            if step.action == "->":
                wire.raw(encode_line(step.text, bindings))
            else:
                command, payload = await wire.receive()
                bindings.match(json.loads(step.text), {"command": command, "payload": payload})
        await wire.close()


def test_blocks_are_examples_or_drawings() -> None:
    """Every block with messages must be an executed example. (SQL is executed in test_fences.py.)"""
    for block in BLOCKS:
        assert block.language in ("transcript", "text", "sql"), block
        assert block.language == "transcript" or '"command"' not in block.text, f"{block}: write it as a transcript"


def test_everything_has_an_example() -> None:
    sent, received, reasons, codes = set(), set(), set(), set()
    for step in (step for block in EXAMPLES for step in steps(block)):
        try:
            message = json.loads(step.text)
            command, payload = message["command"], message["payload"]
        except (ValueError, TypeError):
            continue
        if step.action == "->":
            sent.add(command)
        else:
            received.add(command)
            reasons.add(payload.get("reason"))
            codes.add(payload.get("code"))
    assert set(diagnostics.FIELD_CHECKS) <= sent
    answers = {
        "queued",
        "locked",
        "released",
        "extended",
        "welcome",
        "pong",
        "inspected",
        "watching",
        "unwatched",
        "bye",
    }
    assert received == answers | {"event", "error"}
    assert set(Reason) <= reasons
    assert codes >= {"bad-json", "bad-message", "bad-request", "unknown-command", "unknown-id", "ref-conflict"}
    assert codes >= {"unknown-namespace", "unsupported-protocol", "unavailable"}


def test_commands_reasons_and_codes_are_all_there() -> None:
    assert {code(row["The client sends"]) for row in table(PAGE, "The client sends")} == set(diagnostics.FIELD_CHECKS)
    assert {code(row["`reason`"]) for row in table(PAGE, "`reason`")} == set(Reason)
    assert {code(row["`code`"]) for row in table(PAGE, "`code`")} == set(Code)
    assert f"nesting deeper than {limits.MAX_DEPTH}" in "\n".join(prose(PAGE))


def test_the_fields_of_other_commands_are_all_there() -> None:
    text = "\n".join(prose(PAGE))
    for command in diagnostics.FIELD_CHECKS.keys() - {"request"}:
        (shown,) = re.findall(rf"^## `{command}`\n\n`\{{(.*?)\}}`", text, re.MULTILINE)
        named = {name.strip().strip('"?').rstrip('"'): name.endswith("?") for name in shown.split(",") if name}
        optional = {
            field: field not in diagnostics.REQUIRED_FIELDS.get(command, ())
            for field in diagnostics.FIELD_CHECKS[command]
        }
        assert named == optional, command


def test_the_fields_of_request_are_as_they_are_checked() -> None:
    rows = {code(row["Field"]): row for row in table(PAGE, "Field", "Type")}
    check = diagnostics.FIELD_CHECKS["request"]
    assert rows.keys() == check.keys()
    default = Request()
    defaults = {
        "resources": "this or `anyOf`",
        "anyOf": "this or `resources`",
        "weights": "1 each",
        "target": "required with `anyOf`",
        "queueTimeout": f"{default.queue_timeout_ms:,}",
        "transactionTimeout": f"{default.transaction_timeout_ms:,}",
        "transactionName": "none",
        "priority": f"{default.priority}",
        "ref": "none",
        "note": "none",
        "traceparent": "none",
        "namespace": "that of the connection",
        "onDisconnect": '`"release"`' if default.release_on_disconnect else '`"keep"`',
    }
    assert {name: row["Default"] for name, row in rows.items()} == defaults
    for name, row in rows.items():
        if name == "onDisconnect":
            words = re.findall(r'`"(\w+)"`', row["Type"])
            good: list[object] = [*words]
            bad: list[object] = ["", "other"]
        elif name in ("weights", "target"):
            (high,) = map(number, re.findall(r"[\d,]+\d", row["Type"]))
            good, bad = [1, high, "1", str(high + 1)], [high + 1, 0, 0.5, "0.5", "-1", "01", ""]
            if name == "weights":
                good, bad = [[value] for value in good], [[value] for value in bad]
        elif name == "traceparent":
            (length,) = map(number, re.findall(r"\d+", row["Type"]))
            context = f"00-{'a' * 32}-{'1' * 16}-01"
            assert len(context) == length
            good = [context, context.replace("00-", "cc-")]
            bad = [context[:-1], context + "0", context + "\n", context.upper(), context.replace("00-", "ff-")]
            bad += [context.replace("a", "0"), context.replace("1", "0"), "", 1]
        else:
            low, high = map(number, re.findall(r"-?[\d,]*\d", row["Type"]))
            make = {
                "resources": lambda size: [f"shared:{i}" for i in range(size)],
                "anyOf": lambda size: [f"shared:{i}" for i in range(size)],
                "transactionName": lambda size: "n" * size,
                "ref": lambda size: "n" * size,
                "note": lambda size: "n" * size,
                "namespace": lambda size: "n" * size,
            }.get(name, lambda value: value)
            good, bad = [make(low), make(high)], [make(low - 1), make(high + 1)]
        assert good
        assert [check[name](value) for value in good] == [None] * len(good), name
        assert None not in [check[name](value) for value in bad], name


def test_the_limits_are_the_code_s() -> None:
    bounds = {
        "Bytes in a line": framing.MAX_LINE_BYTES,
        "Nesting depth of JSON": limits.MAX_DEPTH,
        "Values in a line": limits.MAX_VALUES,
        "Keys in a line of more than 32,768 bytes; a repeated key counts again": limits.MAX_KEYS,
        "Resources in a request": resources.MAX_RESOURCES,
        "Entries of `anyOf`": resources.MAX_CHOICES,
        "Entries of `anyOf` that ask for units": resources.MAX_UNIT_CHOICES,
        "Greatest weight and greatest target, as numbers": limits.MAX_WEIGHT,
        "Digits of a weight or a target, as a string": limits.MAX_DIGITS,
        "Prefixes watched by a connection": watches.MAX_WATCHES,
        "Characters in a prefix": resources.MAX_NAME,
        "Rows of a `watching`": watches.MAX_WATCHING_ROWS,
        "Bytes of rows in a `watching`": watches.MAX_WATCHING_BYTES,
        "Locked names that are compared with a prefix for a `watching`": watches.MAX_WATCH_SEARCHED_NAMES,
        "Messages buffered for a watcher": watches.MAX_BUFFERED_EVENTS,
        "Characters in a resource's or transaction's name": resources.MAX_NAME,
        "Greatest number of units of a resource": resources.MAX_UNITS,
        "Slashes in the name of a subtree": lock_modes.MAX_SUBTREE_LEVELS,
        "Subtrees in a request": resources.MAX_SUBTREES,
        "Characters in a `ref`": limits.MAX_REF,
        "Characters in a `note`": limits.MAX_NOTE,
        "Characters in a `client`": limits.MAX_CLIENT,
        "Greatest timeout, ms": limits.MAX_TIMEOUT_MS,
        "Greatest absolute value of a priority": limits.MAX_PRIORITY,
        "Default of `queueTimeout` and `transactionTimeout`, ms": Request().queue_timeout_ms,
        "Greatest `limit` of `inspect`": limits.MAX_ROWS,
        "Default `limit` of `inspect`": commands.Inspect().limit,
        "Bytes of rows in an `inspected`": replies.MAX_INSPECTED_BYTES,
        "Uncontended names, and shared or contended names, that are compared with a subtree for an `inspected`": view.MAX_INSPECTED_NAMES,
        "Shared or contended names below a subtree whose holders and waiters are read for an `inspected`": view.MAX_READ_RESOURCES,
        "Resources listed in a row of an `inspected`": replies.MAX_ROW_RESOURCES,
        "Blockers listed": view.MAX_LISTED_BLOCKERS,
        "Transactions of a cycle listed": replies.MAX_LISTED_OWNERS,
        "Blockers counted exactly": view.MAX_COUNTED_BLOCKERS,
        "Blockers counted exactly in a `locked`": view.MAX_COUNTED_ON_ARRIVAL,
        "Ended ids that the server remembers, at least": manager.RECENT_OUTCOMES,
        "Retained replies of a connection or session": session.MAX_RETAINED_REPLIES,
        "Retained replies of all sessions together": sessions.MAX_RETAINED_REPLIES_TOTAL,
        "Characters in the secret of a session, minimum": limits.MIN_SECRET,
        "Characters in the secret of a session, maximum": limits.MAX_SECRET,
        "Default of `sessionTimeout`, ms": commands.Hello().session_timeout_ms,
        "Characters in an access token": limits.MAX_TOKEN,
        "Characters in a namespace": limits.MAX_NAMESPACE,
        "Bytes in the first line, if the server has access tokens": auth.MAX_HELLO_BYTES,
        "Seconds until the first line is complete, if the server has access tokens": auth.HELLO_TIMEOUT_S,
        "Requests of a session, held and waiting": SETTINGS.limits.max_requests_per_session,
        "Requests of a connection without a session, held and waiting": SETTINGS.limits.max_requests_per_connection,
        "Bytes of a reply that is retained with its details": session.MAX_RETAINED_REPLY_BYTES,
        "Held locks, one for each resource of a request; checked on arrival, so waiting requests may be granted beyond it": SETTINGS.limits.max_locks,
        "Wait-queue entries, one for each resource of a waiting request, and one for each subtree above its resources that is locked or waited for": SETTINGS.limits.max_queue,
        "Retained replies of all connections without a session together, beyond the replies that each can retain": sessions.MAX_RETAINED_REPLIES_TOTAL,
        "Retained replies that each connection without a session can retain": sessions.GUARANTEED_REPLIES,
        "Levels that are searched for subtrees above the names of `anyOf`, while subtrees are locked or waited for": MAX_SEARCHED_LEVELS,
        "Bytes of held and waiting requests, sessions and watches": SETTINGS.limits.max_state,
        "Steps of the search for a deadlock and of the rearrangement of queues, for one request": MAX_ARRIVAL_STEPS,
        "Requests that wait below the new subtrees of a request, which no other request names": MAX_WAITERS_BELOW,
        "Queues in which a request may wait, of its resources and of the subtrees above them that are locked or waited for": MAX_QUEUES,
        "Comparisons of a locked name with a subtree, for a request that names several": MAX_COMPARED_NAMES,
        "Connections": SETTINGS.limits.max_connections,
        "Connections from one address": SETTINGS.limits.max_connections_per_address,
        "Greatest absolute value of an id in a command": limits.MAX_ID,
        "Bytes in the input queue of a connection": scheduler.MAX_QUEUED_BYTES,
        "Bytes in the input queues of all connections to a namespace": SETTINGS.limits.max_pending,
        "Bytes of incomplete lines of all connections together": SETTINGS.limits.max_partial,
        "Seconds from the first byte of a line to its last": partial_lines.MAX_LINE_AGE_S,
        "Output buffer limit of a connection, in bytes": SETTINGS.limits.max_unread,
        "Unread bytes of all connections together": SETTINGS.limits.max_unread_total,
        "Seconds in which a client with unread messages reads nothing": unread_output.MAX_STALL_S,
    }
    rows = table(PAGE, "What", "Limit")
    assert {row["What"]: number(row["Limit"]) for row in rows} == bounds
    for row in rows:
        if row["Set by"]:
            field = code(row["Set by"]).removeprefix("GENIE_").lower()
            assert SETTINGS.options()[field] == bounds[row["What"]]


@pytest.mark.parametrize(
    "sentence",
    [
        f"an integer from 1 to {limits.MAX_ROWS:,}, and {commands.Inspect().limit} by default",
        f"the first {view.MAX_LISTED_BLOCKERS} of the requests",
        f"nothing for about {connection.LINGER_IDLE_S:.0f} s",
        f"About {connection.LINGER_S:.0f} s have passed since the half-close",
        f"discarded more than {connection.MAX_LINGER_BYTES >> 20} MiB of input",
        f"not completed within {partial_lines.MAX_LINE_AGE_S:.0f} s",
        f"when the leader's lease has ended: {SETTINGS.lease:.0f} s by default (`GENIE_LEASE`)",
        f"A number of {view.MAX_COUNTED_BLOCKERS:,} is a lower bound",
        f"the first {view.MAX_LISTED_BLOCKERS} requests that blocked it then, and the number of all. A number below {view.MAX_COUNTED_ON_ARRIVAL} is exact",
        f"the last {manager.RECENT_OUTCOMES:,} ids",
        f"the last {session.MAX_RETAINED_REPLIES:,} ended requests of a connection or session, and of the last {sessions.MAX_RETAINED_REPLIES_TOTAL:,} of all",
        f"decimal strings of up to {limits.MAX_DIGITS} digits",
        f"within {auth.HELLO_TIMEOUT_S:.0f} seconds and be at most {auth.MAX_HELLO_BYTES:,} bytes long",
        f"a string of 1 to {limits.MAX_TOKEN:,} characters. A server without access tokens",
        f"a string of 1 to {limits.MAX_NAMESPACE} letters (A to Z, a to z), digits or any of",
        f"a secret of {limits.MIN_SECRET} to {limits.MAX_SECRET} characters",
        f"1 to {limits.MAX_TIMEOUT_MS}, by default {commands.Hello().session_timeout_ms:,}",
        f"at most {replies.MAX_ROW_RESOURCES} of its resources",
        f"1 ≤ K ≤ N ≤ {resources.MAX_UNITS:,}",
        f"at most {view.MAX_INSPECTED_NAMES:,} uncontended and {view.MAX_INSPECTED_NAMES:,} shared or contended names",
        f"of at most {view.MAX_READ_RESOURCES:,} shared or contended names",
        f"If there are more than {dispatcher.MANY_NAMES:,} locked names, the server executes the request after",
        f"unless it is longer than {session.MAX_RETAINED_REPLY_BYTES:,} bytes",
        f"1 to {resources.MAX_NAME} characters, any but control characters",
    ],
)
def test_the_limits_are_the_same_in_sentences(sentence: str) -> None:
    assert sentence in " ".join(" ".join(prose(PAGE)).split())


# -- the means by which the pages are checked, checked ------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "real"),
    [
        ({"id": 1}, {"id": 5, "ref": "x"}),
        ({"id": 1, "reason": "success"}, {"id": 5, "reason": "deadlock"}),
        ([{"id": 1}, {"id": 2}], [{"id": 5}, {"id": 5}]),
        ([{"id": 1}, {"id": 2}], [{"id": 6}, {"id": 5}]),
        ([{"id": 1}, {"id": 1}], [{"id": 5}, {"id": 6}]),
        ({"fence": 1}, {"fence": "5"}),
        ({"waited": 20}, {"waited": 19.9}),
        ({"expiresIn": 20}, {"expiresIn": 21}),
        ({"since": 1}, {"since": 1}),
        ({"message": "no…"}, {"message": "yes"}),
        ({"priority": 1}, {"priority": True}),
        ({"waits": []}, {"waits": [1]}),
    ],
)
def test_a_difference_between_documented_and_real_values_is_detected(shown: object, real: object) -> None:
    with pytest.raises(AssertionError):
        Bindings().match(shown, real)


REQUEST = 'A -> {"command":"request","payload":{"resources":["shared:x"]}}'
QUEUED = 'A <- {"command":"queued","payload":{"id":1}}'


@pytest.mark.parametrize(
    "lines",
    [
        (REQUEST, QUEUED),
        (REQUEST, QUEUED, QUEUED),
        (REQUEST, "A is closed"),
        ("A sends hello",),
        (REQUEST, "B -> hello"),
    ],
    ids=str,
)
async def test_a_missing_or_additional_message_is_detected(lines: tuple[str, ...], genie: Genie) -> None:
    with pytest.raises(AssertionError):
        await execute(Block("a page", 0, "transcript", lines), genie.address)


def test_terminal_output_is_matched() -> None:
    screen = Screen()
    screen.match("lock 1790000000000001, …, 0.3 ms", "lock 1795226145319060, fence x, 12 ms")
    assert screen.fill("release 1790000000000001") == "release 1795226145319060"
    screen.match("a  1790000000000001 b", "a 1795226145319060    b")
    screen.match_all(["…", "end"], ["1", "2", "end"])
    for wrong in (["…", "end"], ["…", "1", "2", "3"], ["1"], ["1", "2", "…", "2"]):
        with pytest.raises(AssertionError):
            screen.match_all(wrong, ["1", "2"])
    for wrong in ("1790000000000001 …", "1790000000000002 1790000000000002", "… 5 ms"):
        with pytest.raises(AssertionError):
            screen.match(wrong, "1795226145319061 1795226145319062")
