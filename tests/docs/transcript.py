"""Executes an example of protocol.md: `A -> line`, `A <- message`, `A closes`, `A half-closes`, `A is closed`, `# comment`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson
from matching import Bindings
from pages import Block

from support.network.wire import Wire

STEP = re.compile(r"([A-Z]) (->|<-|closes$|half-closes$|is closed$) ?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Step:
    line: int
    connection: str
    action: str
    text: str


def steps(block: Block) -> list[Step]:
    """Parse the steps of a block. AssertionError if a line is not a step."""
    found: list[Step] = []
    for number, line in enumerate(block.lines, block.line + 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(" ") and found:
            last = found.pop()
            found.append(Step(last.line, last.connection, last.action, f"{last.text}\n{line.strip()}"))
            continue
        step = STEP.fullmatch(line)
        assert step is not None, f"{block.page}:{number}: {line!r} is not a step of a transcript"
        assert bool(step[3]) == (step[2] in ("->", "<-")), f"{block.page}:{number}: {line!r}"
        found.append(Step(number, step[1], step[2], step[3]))
    return found


async def execute(block: Block, address: tuple[str, int]) -> None:
    """Execute an example on new connections. At its end all messages must have been shown."""
    bindings, open_, ended = Bindings(), dict[str, Wire](), dict[str, Wire]()
    unanswered = ""
    try:
        for step in steps(block):
            where = f"{block.page}:{step.line}"
            if step.connection not in open_ and step.connection not in ended:
                open_[step.connection] = await Wire.connect(address)
            wire = open_.get(step.connection) or ended[step.connection]
            if step.action == "->":
                # The order of commands of different connections is defined only by their replies.
                assert unanswered in ("", step.connection), f"{where}: first show the reply that {unanswered} receives"
                unanswered = step.connection
                wire.raw(encode_line(step.text, bindings))
            elif step.action == "<-":
                unanswered = "" if unanswered == step.connection else unanswered
                command, payload = await wire.receive()
                try:
                    bindings.match(json.loads(step.text), {"command": command, "payload": payload})
                except (AssertionError, ValueError) as error:
                    raise AssertionError(f"{where}: {error}\n real: {command} {payload}") from None
            elif step.action == "is closed":
                unanswered = ""
                assert await wire.receive() == ("closed", {}), where
                ended[step.connection] = open_.pop(step.connection, wire)
            elif step.action == "half-closes":
                wire.writer.write_eof()
                ended[step.connection] = open_.pop(step.connection)
            else:
                await wire.close()
                ended[step.connection] = open_.pop(step.connection)
        for connection, wire in open_.items():
            wire.send("ping")
            message = await wire.receive()
            assert message == ("pong", {}), f"{block}: {connection} receives a message that is not shown: {message}"
    finally:
        for wire in (*open_.values(), *ended.values()):
            await wire.close()
        await release_all(address)


def encode_line(text: str, bindings: Bindings) -> bytes:
    """Return the bytes to send for a documented line. A line that is not JSON is sent as it is."""
    try:
        message: Any = json.loads(text)
    except ValueError:
        return text.encode() + b"\n"
    return orjson.dumps(bindings.fill(message)) + b"\n"


async def release_all(address: tuple[str, int]) -> None:
    """Release all locks, so that the next example starts without any."""
    wire = await Wire.connect(address)
    while True:
        wire.send("inspect")
        rows = await wire.expect("inspected")
        ids = [row["id"] for row in (*rows["queue"], *rows["holders"])]
        if not ids:
            break
        for id_ in ids:
            assert await wire.release(id_) in ("success", "disconnected", "transaction-timeout")
    await wire.close()
