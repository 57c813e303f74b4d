"""The tables of docs/how-to/fencing.md agree with the code, and the SQL of protocol.md behaves as that page says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from pages import blocks, code, prose, table
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

import genie as package
from genie.sql import FencedTable
from support.databases.fenced_accounts import DIALECTS, NEWER, OLDER, Accounts, database_url

PAGE = "docs/how-to/fencing.md"
SQL = [block.text for block in blocks("protocol.md") if block.language == "sql"]


def test_the_calls_are_those_of_the_code() -> None:
    shown = dict(re.fullmatch(r"`(\w+)\((.*)\)`", row["Call"]).groups() for row in table(PAGE, "Call"))  # type: ignore[union-attr]
    public = {name: value for name, value in vars(FencedTable).items() if not name.startswith("_")}
    assert shown == {
        name: ", ".join(_parameter(parameter) for parameter in _parameters(method)) for name, method in public.items()
    }


def _parameters(method: Any) -> list[inspect.Parameter | None]:
    """None stands for the star before the keyword-only ones."""
    _, *parameters = inspect.signature(method).parameters.values()
    first = next(at for at, parameter in enumerate(parameters) if parameter.kind is parameter.KEYWORD_ONLY)
    return [*parameters[:first], None, *parameters[first:]]


def _parameter(parameter: inspect.Parameter | None) -> str:
    if parameter is None:
        return "*"
    default = "" if parameter.default is parameter.empty else f"={parameter.default}"
    return f"{parameter.name}{default}"


def test_every_error_is_there() -> None:
    assert "genie.StaleFence" in {code(row["Error"]) for row in table(PAGE, "Error")}
    for name in re.findall(r"`genie\.([A-Za-z_.]+)", "\n".join(prose(PAGE))):
        thing: object = package
        for part in name.split("."):
            thing = getattr(thing, part)


@pytest.mark.parametrize("kind", DIALECTS)
async def test_the_sql_of_the_protocol_refuses_a_late_write(kind: str, tmp_path: Path) -> None:
    """A read is refused by a greater fence in the row, a write by a row count of 0. The rows are those of the page's table."""
    read, write = SQL
    if kind == "mariadb":
        read, _, columns = read.partition("RETURNING")
        select = f"SELECT{columns.rstrip()} FROM accounts WHERE id = :id FOR UPDATE"
        assert f"`{select}`" in " ".join(" ".join(prose("protocol.md")).split())
    accounts = Accounts(kind, database_url(kind, tmp_path))
    await accounts.create()

    async def reads(connection: AsyncConnection, fence: int) -> tuple[int, int]:
        found = await connection.execute(text(read), {"id": 1, "fence": fence})
        if kind == "mariadb":
            found = await connection.execute(text(select), {"id": 1})
        balance, seen = found.one()
        return balance, seen

    async def writes(connection: AsyncConnection, fence: int, balance: int) -> int:
        return (await connection.execute(text(write), {"id": 1, "fence": fence, "balance": balance})).rowcount

    async with accounts.engine.begin() as connection:
        assert await reads(connection, OLDER) == (100, OLDER)
        assert await reads(connection, NEWER) == (100, NEWER)
        assert await writes(connection, OLDER, 90) == 0
        assert await reads(connection, OLDER) == (100, NEWER)
        assert await writes(connection, NEWER, 120) == 1
        assert await reads(connection, NEWER) == (120, NEWER)
    await accounts.engine.dispose()
