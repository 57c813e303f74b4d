"""No command prints a character that controls a terminal, whatever the ledger contains."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from support.processes.commands import genie_cli
from support.runs.hostile_text import assert_printable, of


def ledger_cli(*args: str, database: str) -> subprocess.CompletedProcess[str]:
    return genie_cli(*args, program="genie-ledger", database=database)


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    """The URL of a ledger with an expired transfer whose id is hostile, and with a state that is."""
    file = tmp_path / "ledger.db"
    url = f"sqlite:///{file}"
    made = ledger_cli("generate", "--transfers", "30", "--expired", "3", "--seed", "1", database=url)
    assert made.returncode == 0, made.stderr
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        (id_,) = connection.execute("SELECT transferId FROM transfer ORDER BY expirationDate LIMIT 1").fetchone()
        for table in ("transfer", "transferStateChange"):
            connection.execute(f"UPDATE {table} SET transferId = ? WHERE transferId = ?", (of("id"), id_))  # noqa: S608
        connection.execute(
            "UPDATE transferStateChange SET transferStateId = ? WHERE transferStateChangeId = 1", (of("STATE"),)
        )
        connection.commit()
    return url


@pytest.mark.parametrize(
    "args",
    [
        ("explain",),
        ("explain", "--json"),
        ("run", "--once"),
        ("run", "--once", "--on-expired", "exit 1"),
        ("status",),
        ("status", "--json"),
        ("run", "--once", "--lock", of("lock")),
    ],
    ids=ascii,
)
def test_the_output_about_a_ledger_is_printable(ledger: str, args: tuple[str, ...]) -> None:
    if args[0] == "status":
        assert ledger_cli("run", "--once", "--on-expired", "exit 1", database=ledger).returncode == 1
    result = ledger_cli(*args, database=ledger)
    assert "Traceback" not in result.stderr
    assert_printable(result.stdout)
    assert_printable(result.stderr)
    if args in (("explain",), ("run", "--once")):
        assert "id\\" in result.stdout
