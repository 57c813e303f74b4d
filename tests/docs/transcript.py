"""Plays an example: `A -> line`, `A <- message`, `A closes`, `A half-closes`, `A is closed`, `# comment`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson
from matching import Book
from pages import Block

from wire import Wire

STEP = re.compile(r"([A-Z]) (->|<-|closes$|half-closes$|is closed$) ?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Step:
    line: int
    who: str
    what: str
    text: str


def steps(block: Block) -> list[Step]:
    """The steps of a block; AssertionError where a line is none."""
    found: list[Step] = []
    for number, line in enumerate(block.lines, block.line + 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(" ") and found:
            last = found.pop()
            found.append(Step(last.line, last.who, last.what, f"{last.text}\n{line.strip()}"))
            continue
        step = STEP.fullmatch(line)
        assert step is not None, f"{block.page}:{number}: {line!r} is no step of a transcript"
        assert bool(step[3]) == (step[2] in ("->", "<-")), f"{block.page}:{number}: {line!r}"
        found.append(Step(number, step[1], step[2], step[3]))
    return found


async def play(block: Block, address: tuple[str, int]) -> None:
    """Play an example on new connections. At its end no message may be left unread."""
    book, open_, ended = Book(), dict[str, Wire](), dict[str, Wire]()
    unanswered = ""
    try:
        for step in steps(block):
            where = f"{block.page}:{step.line}"
            if step.who not in open_ and step.who not in ended:
                open_[step.who] = await Wire.connect(address)
            wire = open_.get(step.who) or ended[step.who]
            if step.what == "->":
                # Between connections nothing orders commands but their answers.
                assert unanswered in ("", step.who), f"{where}: wait for what {unanswered} gets first"
                unanswered = step.who
                wire.raw(line(step.text, book))
            elif step.what == "<-":
                unanswered = "" if unanswered == step.who else unanswered
                command, payload = await wire.receive()
                try:
                    book.match(json.loads(step.text), {"command": command, "payload": payload})
                except (AssertionError, ValueError) as error:
                    raise AssertionError(f"{where}: {error}\n real: {command} {payload}") from None
            elif step.what == "is closed":
                unanswered = ""
                assert await wire.receive() == ("closed", {}), where
                ended[step.who] = open_.pop(step.who, wire)
            elif step.what == "half-closes":
                wire.writer.write_eof()
                ended[step.who] = open_.pop(step.who)
            else:
                await wire.close()
                ended[step.who] = open_.pop(step.who)
        for who, wire in open_.items():
            wire.send("ping")
            said = await wire.receive()
            assert said == ("pong", {}), f"{block}: {who} gets more than is shown: {said}"
    finally:
        for wire in (*open_.values(), *ended.values()):
            await wire.close()
        await release_all(address)


def line(text: str, book: Book) -> bytes:
    """What is sent. What is no JSON is sent as it stands."""
    try:
        message: Any = json.loads(text)
    except ValueError:
        return text.encode() + b"\n"
    return orjson.dumps(book.fill(message)) + b"\n"


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
