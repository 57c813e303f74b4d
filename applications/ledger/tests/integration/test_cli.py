"""`genie-ledger` on real databases, as processes and in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from genie_ledger.cli import main
from ledger_queries import overdue, query
from support.databases.mariadb import mariadb
from support.databases.postgres import postgres
from support.processes.ports import free_port
from support.processes.programs import Forked, start_genie
from support.processes.servers import WAIT_S, running_server

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
WITHOUT = "import sys; sys.modules[{name!r}] = None; from genie_ledger.cli import main; main(prog_name='genie-ledger')"


def start(url: str, *args: str, **options: Any) -> subprocess.Popen[str] | Forked:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return start_genie(*args, program="genie-ledger", env=ENVIRONMENT | {"GENIE_DATABASE": url}, text=True, **streams)


def genie(url: str, *args: str) -> tuple[int, str, str]:
    """Run a command as a process; return exit status, stdout and stderr."""
    with start(url, *args) as process:
        out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def in_process(url: str, *args: str) -> tuple[int, str, str]:
    """Run a command in this process, which is faster; return exit status, stdout and stderr."""
    done = CliRunner().invoke(main, args, env={"GENIE_DATABASE": url})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def url(file: Path) -> str:
    """The URL of a ledger with 300 transfers, of which 6 are expired."""
    url = f"sqlite:///{file}"
    assert in_process(url, "generate", "--transfers", "300", "--expired", "6", "--seed", "1")[0] == 0
    return url


def delivered(lines: str) -> list[tuple[str, str]]:
    """Return the ids and states of delivered transfers, after checking their format."""
    transfers = [json.loads(line) for line in lines.splitlines()]
    assert all(set(each) == {"transferId", "expirationDate", "state"} for each in transfers)
    assert all(each["expirationDate"][-1] == "Z" and each["expirationDate"][10] == "T" for each in transfers)
    return sorted((each["transferId"], each["state"]) for each in transfers)


def stop(process: subprocess.Popen[str] | Forked, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


# -- all commands, on all databases ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new",
    [
        lambda path: f"sqlite:///{path / 'a ledger.db'}",
        lambda _: postgres().new_database(),
        lambda _: mariadb().new_database(),
    ],
    ids=["sqlite", "postgres", "mariadb"],
)
def test_all_commands_on_an_empty_database(new: Callable[[Path], str], tmp_path: Path) -> None:
    url, seen = new(tmp_path), tmp_path / "seen"

    def output_of(*args: str) -> str:
        status, out, err = in_process(url, *args)
        assert status == 0, err
        return out

    def counts() -> dict[str, int]:
        found = json.loads(output_of("status", "--json"))
        assert found.pop("unlisted") == {}
        return found

    def run() -> int:
        seen.write_text("")
        output_of("run", "--once", "--on-expired", f"cat > '{seen}'")
        return len(delivered(seen.read_text()))

    made = output_of("generate", "--transfers", "300", "--expired", "6", "--seed", "1")
    assert made.startswith("300 transfers with 1,0")
    last = counts()["last"]
    assert counts() == {"segment": 0, "last": last, "lag": last, "pending": 0, "overdue": 0, "delivered": 0}
    assert [run(), run()] == [6, 0]
    waiting = counts()["pending"]
    assert waiting > 20
    assert counts() == {"segment": last, "last": last, "lag": 0, "pending": waiting, "overdue": 0, "delivered": 6}
    assert output_of("shift", "--hours", "-169.5") == "300 transfers: expiration dates shifted by -169.5 h\n"
    assert run() == waiting
    assert output_of("finalize", "--limit", "2") == "2 transfers are ABORTED\n"
    assert output_of("finalize", "--overdue", "--state", "EXPIRED") == f"{waiting + 4} transfers are EXPIRED\n"
    assert output_of("status") == (
        f"segment: {last:,} of {counts()['last']:,}, lag: {waiting + 6}\n"
        f"pending: 0, overdue: 0, delivered: {waiting + 6}\n"
    )
    assert run() == 0
    assert counts()["delivered"] == counts()["lag"] == 0


def test_unlisted_states_are_printed_once_and_shown_by_status(file: Path, url: str) -> None:
    process = start(url, "run", "--every", "0.01", "--on-expired", "cat >/dev/null")
    messages = [process.stderr.readline()]
    insert = "INSERT INTO transferStateChange (transferId, transferStateId) VALUES (?, ?)"
    states = ["RECEIVED_ERROR", "RECEIVED_ERROR", "RESERVED_FORWARDED"]
    for (id, _), state in zip(overdue(file), states, strict=False):
        query(file, insert, id, state)
        if state not in str(messages):
            messages.append(process.stderr.readline())
    text = (
        "genie-ledger: neither processing nor final states, in which transfers do not expire: {} (state changes: 1)\n"
    )
    assert messages == [
        "genie-ledger: 6 expired\n",
        *(text.format(state) for state in ("RECEIVED_ERROR", "RESERVED_FORWARDED")),
    ]
    assert stop(process)[::2] == (0, "")
    status, out, _ = in_process(url, "status")
    assert (status, out.splitlines()[-1]) == (0, "unlisted: 2 RECEIVED_ERROR, 1 RESERVED_FORWARDED")
    assert in_process(url, "finalize", "--overdue")[1] == "3 transfers are ABORTED\n"


# -- explain ----------------------------------------------------------------------------------------------


def test_explain_shows_expired_transfers_and_why(file: Path, url: str) -> None:
    (first, state), *_ = overdue(file)

    def line() -> str:
        code, out, err = in_process(url, "explain")
        assert (code, err) == (0, "")
        *lines, summary = out.splitlines()
        assert sorted(line.partition(":")[0] for line in lines) == [transfer for transfer, _ in overdue(file)]
        description = next(line for line in lines if line.startswith(first))
        return f"{re.sub(r'[0-9]{4}-[^ ]*Z', 'DATE', description)} | {summary}"

    number = query(file, "SELECT MAX(transferStateChangeId) FROM transferStateChange WHERE transferId = ?", first)[0]
    last = query(file, "SELECT MAX(transferStateChangeId) FROM transferStateChange")[0]
    why = rf"{first}: {state} since state change {number}, expired DATE \([0-9]+ (d|h|min|s) ago\)"
    read = "the handler has read up to state change 0, a later run hands it over"
    assert re.fullmatch(rf"{why}; {read} \| 6 expired: 6 not read yet", line())
    assert in_process(url, "run", "--once", "--on-expired", "cat >/dev/null")[0] == 0
    assert re.fullmatch(rf"{why}; delivered DATE and not final yet \| 6 expired: 6 delivered", line())
    code, out, _ = in_process(url, "explain", "--json", "--limit", "2")
    found = [json.loads(one) for one in out.splitlines()]
    keys = {"transferId", "expirationDate", "state", "stateChange", "handler", "deliveredDate"}
    assert (code, [set(one) for one in found]) == (0, [keys] * 2)
    assert {one["handler"] for one in found} == {"delivered"}
    assert in_process(url, "explain", "--limit", "2")[1].endswith("the first 2 expired transfers: 2 delivered\n")
    assert in_process(url, "finalize", "--overdue")[0] == 0
    assert in_process(url, "explain")[:2] == (0, "0 expired\n")
    assert last < query(file, "SELECT MAX(transferStateChangeId) FROM transferStateChange")[0]


def test_a_ledger_in_local_time(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    (tmp_path / "genie.toml").write_text("[ledger]\ntime_zone = 'Asia/Kolkata'\n")
    url, zone = f"sqlite:///{file}", ("--config", str(tmp_path / "genie.toml"))
    assert (
        in_process(url, "generate", "--transfers", "30", "--expired", "3", "--seed", "1", "--hours", "0-1", *zone)[0]
        == 0
    )
    assert overdue(file) == [], "as UTC they are hours ahead"
    assert len(overdue(file, "+330 minutes")) == 3
    assert in_process(url, "explain", *zone)[1].endswith("3 expired: 3 not read yet\n")
    status, out, err = genie(url, "run", "--once", *zone)
    assert (status, delivered(out), err) == (0, overdue(file, "+330 minutes"), "genie-ledger: 3 expired\n")


@pytest.mark.parametrize(
    "command", ["status", "explain", "run --once", "finalize", "shift --hours 1", "generate --transfers 1"]
)
def test_every_command_takes_the_names_from_a_file(file: Path, url: str, command: str) -> None:
    for table, own in (("transfer", "payments"), ("transferStateChange", "payment_states")):
        query(file, f"ALTER TABLE {table} RENAME TO {own}")
    query(file, "ALTER TABLE payment_states RENAME COLUMN transferStateId TO state")
    config = file.parent / "genie.toml"
    mapping = "[ledger.transfer]\ntable = 'payments'\n[ledger.transferStateChange]\ntable = 'payment_states'\n"
    config.write_text(mapping)
    assert error_of(url, *command.split(), "--config", str(config)).endswith(
        "table payment_states: column transferStateId is missing"
    )
    config.write_text(f"{mapping}transferStateId = 'state'\n")
    status, _, err = in_process(url, *command.split(), "--config", str(config))
    assert status == 0, err
    expected = {"payments", "payment_states", "segment", "transferTimeout", "timeoutInterval"}
    assert expected == set(
        query(file, "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
    )


# -- progress ---------------------------------------------------------------------------------------------


def test_progress_is_printed_in_lines_without_a_terminal(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    code, out, err = genie(url, "generate", "--transfers", "25", "--seed", "1", "--progress", "10")
    assert (code, err) == (0, "genie-ledger: 10 of 25 transfers\ngenie-ledger: 20 of 25 transfers\n")
    assert out.startswith("25 transfers with ")
    code, out, err = genie(url, "shift", "--hours", "1", "--progress", "10")
    assert (code, err) == (0, "genie-ledger: 25 of 25 transfers\n"), "a single statement shifts all of them"
    status, _, err = in_process(url, "generate", "--transfers", "6000", "--seed", "2")
    assert (status, err) == (0, "genie-ledger: 5,000 of 6,000 transfers\n")
    last = query(tmp_path / "ledger.db", "SELECT MAX(transferStateChangeId) FROM transferStateChange")[0]
    process = start(url, "run", "--batch", "4000", "--progress", "8000")
    lines = [process.stderr.readline().strip() for _ in range(3)]
    assert lines == [
        f"genie-ledger: read up to state change {number:,} of {last:,}" for number in (8_000, 16_000, last)
    ]
    assert stop(process) == (0, "", "")


# -- run --------------------------------------------------------------------------------------------------


def test_it_runs_periodically_until_sigterm(file: Path, url: str) -> None:
    """The command prints progress while it lags, and delivers a transfer that expires later in the next run."""
    process = start(url, "run", "--every", "0.02", "--batch", "400", "--progress", "400")
    changes = query(file, "SELECT MAX(transferStateChangeId) FROM transferStateChange")[0]
    progress = [f"genie-ledger: read up to state change {last:,} of {changes:,}" for last in (400, 800, changes)]
    messages: list[str] = []

    def expired() -> int:
        return sum(int(line.split()[1]) for line in messages if line.endswith(" expired"))

    while expired() < 6 or progress[-1] not in messages:
        messages.append(process.stderr.readline().strip())
    assert delivered("".join(process.stdout.readline() for _ in range(6))) == overdue(file)
    (late,) = _waiting(file)
    query(file, "UPDATE transfer SET expirationDate = '2026-01-31 12:00:00.5' WHERE transferId = ?", late)
    found = json.loads(process.stdout.readline())
    assert (found["transferId"], found["expirationDate"]) == (late, "2026-01-31T12:00:00.500Z")
    messages.append(process.stderr.readline().strip())
    assert stop(process) == (0, "", "")
    assert expired() == 7
    assert [line for line in messages if "state change" in line] == progress


def _waiting(file: Path) -> list[str]:
    statement = """
    SELECT MIN(transferId) FROM transferStateChange
    WHERE transferId IN (SELECT transferId FROM transferStateChange GROUP BY transferId HAVING COUNT(*) = 2)
    AND transferId NOT IN (SELECT transferId FROM transferTimeout WHERE expirationDate < '2026-01-30')
    AND transferId IN (SELECT transferId FROM transfer WHERE currencyId = 'EUR')
    """
    return query(file, statement)


def test_a_command_receives_expired_transfers_and_accepts_them_by_its_exit_status(file: Path, url: str) -> None:
    seen = file.parent / "seen"
    code, out, err = genie(url, "run", "--once", "--on-expired", f"cat > {seen}; exit 3")
    assert (code, out) == (1, "")
    assert err == "genie-ledger: 6 expired, 6 rejected: the command ended with status 3\n"
    assert delivered(seen.read_text()) == overdue(file)
    seen.unlink()
    code, out, err = genie(url, "run", "--once", "--on-expired", f"cat > {seen}; echo done")
    assert (code, out, err) == (0, "done\n", "genie-ledger: 6 expired\n")
    assert delivered(seen.read_text()) == overdue(file)
    seen.unlink()
    assert genie(url, "run", "--once", "--on-expired", f"touch {seen}") == (0, "", "")
    assert not seen.exists()


def test_a_command_that_does_not_read_and_a_killed_command(url: str) -> None:
    code, _, err = genie(url, "run", "--once", "--on-expired", "kill -9 $$")
    assert (code, err) == (1, "genie-ledger: 6 expired, 6 rejected: the command was ended by signal 9\n")
    assert genie(url, "run", "--once", "--on-expired", "exit 0") == (0, "", "genie-ledger: 6 expired\n")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_also_ends_the_command(file: Path, url: str, number: signal.Signals, status: int) -> None:
    """All its processes are ended, and the batch is delivered again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = (
            "import socket, sys, time; "
            f"s = socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); s.send(b'x'); time.sleep(600)"
        )
        process = start(url, "run", "--on-expired", f'{sys.executable} -c "{child}"; true')
        with closing(server.accept()[0]) as connection:
            connection.settimeout(WAIT_S)
            assert connection.recv(1) == b"x"
            assert stop(process, number) == (status, "", "")
            assert connection.recv(1) == b""  # the child of the shell has ended
    assert len(delivered(genie(url, "run", "--once")[1])) == 6
    assert query(file, "SELECT COUNT(*) FROM segment") == [1]


def test_a_signal_while_the_pipe_of_stdout_is_full(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    assert in_process(url, "generate", "--transfers", "1500", "--expired", "1500")[0] == 0
    process = start(url, "run")
    process.stdout.read(1)  # it has started to write more than fits into the pipe
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    assert process.communicate()[1] == ""


def test_it_ends_without_a_message_when_stdout_is_closed(file: Path, url: str) -> None:
    process = start(url, "run")
    process.stdout.close()
    assert process.wait(WAIT_S) == 1
    assert process.stderr.read() == ""
    process.stderr.close()
    assert query(file, "SELECT COUNT(*) FROM segment") == [0]


def test_another_replica_is_running(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait = f"{sys.executable} -c \"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]})).recv(1)\""
        process = start(url, "run", "--once", "--on-expired", wait)
        with closing(server.accept()[0]):
            assert genie(url, "run", "--once") == (0, "", "genie-ledger: another replica is running\n")
            waiting = start(url, "run", "--every", "0.01")
            message = waiting.stderr.readline()
            since = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
            assert re.fullmatch(rf"genie-ledger: run lock is held by another replica, waiting since {since}\n", message)
        assert re.fullmatch(r"genie-ledger: run lock acquired after \d+ s\n", waiting.stderr.readline())
        assert stop(waiting) == (0, "", "")
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "genie-ledger: 6 expired\n")


def test_errors_are_printed_and_retried(file: Path, url: str) -> None:
    process = start(url, "run", "--every", "0.01", "--on-expired", "cat")
    assert process.stderr.readline() == "genie-ledger: 6 expired\n"
    query(file, "ALTER TABLE segment RENAME TO renamed_segment")
    assert process.stderr.readline() == f"genie-ledger: sqlite+aiosqlite:///{file}: no such table: segment\n"
    query(file, "ALTER TABLE transfer RENAME TO renamed_transfer")
    query(file, "ALTER TABLE renamed_segment RENAME TO segment")
    assert process.stderr.readline() == f"genie-ledger: sqlite+aiosqlite:///{file}: no such table: transfer\n"
    query(file, "ALTER TABLE renamed_transfer RENAME TO transfer")
    query(file, "UPDATE transfer SET expirationDate = '2026-01-31' WHERE transferId = ?", *_waiting(file))
    assert process.stderr.readline() == "genie-ledger: 1 expired\n"
    assert stop(process)[::2] == (0, "")


def test_a_run_holds_a_lock_of_genie(file: Path, url: str) -> None:
    with running_server() as server:
        locked = ["run", "--once", "--lock", "a ledger", "--port", str(server.port)]
        assert len(delivered(genie(url, *locked)[1])) == 6
        assert query(file, "SELECT fence IS NULL FROM segment") == [0]
        hold = [
            sys.executable,
            "-m",
            "genie.cli",
            "run",
            "exclusive:timeout-handler/a ledger",
            "--port",
            str(server.port),
        ]
        with subprocess.Popen([*hold, "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            holder.stdin.write(b"x\n")
            holder.stdin.flush()
            holder.stdout.readline()  # the command runs, so the lock is held
            assert genie(url, *locked) == (0, "", "genie-ledger: another replica is running\n")
            holder.stdin.close()


# -- invalid input --------------------------------------------------------------------------------------------


def error_of(url: str, *args: str, status: int = 1) -> str:
    """Run a command that fails; return its error, which must be one line."""
    code, out, err = in_process(url, *args)
    assert (code, out) == (status, ""), err
    (line,) = err.splitlines()
    return line.removeprefix("genie-ledger: ")


@pytest.mark.parametrize(
    "command", ["run", "status", "explain", "finalize", "generate --transfers 1", "shift --hours 1"]
)
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("oracle://host/ledger", "unknown database 'oracle'"),
        ("ledger.db", "invalid database URL"),
        ("postgresql://me:se@cret@127.0.0.1:1/ledger", "invalid database URL"),
        ("mysql://ledger@127.0.0.1:1", "the URL names no database"),
        ("postgresql://ledger@127.0.0.1:1/ledger?sslmode=require", "the URL has sslmode, which asyncpg calls ssl"),
        ("postgresql://127.0.0.1:1/ledger", "postgresql+asyncpg://127.0.0.1:1/ledger: "),
        ("mysql://127.0.0.1/a?colour=red", "mysql+asyncmy://127.0.0.1/a: invalid URL: connect()"),
        ("postgresql://127.0.0.1:99999/a", "postgresql+asyncpg://127.0.0.1:99999/a: invalid URL: "),
    ],
)
def test_an_invalid_or_unreachable_url(command: str, url: str, message: str) -> None:
    """The exit status is 2, unless a server was queried."""
    queried = message == "postgresql+asyncpg://127.0.0.1:1/ledger: "
    assert error_of(url, *command.split(), status=1 if queried else 2).startswith(message)


@pytest.mark.parametrize("command", ["run", "status", "explain", "finalize", "shift --hours 1"])
def test_only_generate_creates_a_ledger(command: str, tmp_path: Path) -> None:
    file = tmp_path / "typo.db"
    assert error_of(f"sqlite:///{file}", *command.split()).endswith(f"{file}: there is no such file")
    assert not file.exists()
    query(file, "CREATE TABLE transfer (transferId VARCHAR(36) NOT NULL PRIMARY KEY, expirationDate DATETIME NOT NULL)")
    assert error_of(f"sqlite:///{file}", *command.split()).startswith("the ledger has no table transferStateChange")
    assert query(file, "SELECT name FROM sqlite_master WHERE type = 'table'") == ["transfer"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mysql://me:secret@127.0.0.1:1/ledger", "mysql+asyncmy://me:***@127.0.0.1:1/ledger: "),
        ("postgresql://127.0.0.1:1/a?user=me&password=secret", "postgresql+asyncpg://127.0.0.1:1/a: "),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    line = error_of(url, "status")
    assert line.startswith(shown)
    assert "secret" not in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["status", "--config", "none.toml"], "none.toml: can't be read: No such file or directory"),
        (["finalize", "--state", "RESERVED"], "'RESERVED' is not a final state"),
        (["run", "--on-expired", " "], "--on-expired: the command must not be empty"),
        (["shift", "--hours", "1e8"], "--hours 1e+08: dates can be shifted by at most a century"),
        (
            ["generate", "--transfers", "1", "--expired", "2"],
            "expired must be from 0 to the number of transfers (1), not 2",
        ),
        (["generate", "--transfers", "1", "--amount", "2-1"], "amount must be a range of numbers"),
        (["generate", "--transfers", "10", "--seed", "1"], "the ledger has transfers of seed 1 already"),
        (["run", "--lock", "a", "--port", str(free_port())], "no server at 127.0.0.1:"),
    ],
)
def test_invalid_arguments_are_one_error(url: str, args: list[str], message: str) -> None:
    """The exit status is 2, unless a server was queried."""
    queried = message.startswith("no server")
    assert message in error_of(url, *args, status=1 if queried else 2)


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["shift", "--hours", "nan"], "--hours"),
        (["run", "--every", "0"], "--every"),
        (["run", "--batch", "0"], "--batch"),
        (["run", "--progress", "0"], "--progress"),
        (["generate", "--transfers", "1", "--amount", "7"], "--amount"),
        (["generate", "--transfers", "1", "--amount", "1-1.5"], "--amount"),
    ],
)
def test_invalid_options_are_usage_errors(url: str, args: list[str], option: str) -> None:
    status, _, err = in_process(url, *args)
    assert status == 2
    assert f"Invalid value for '{option}'" in err


def test_a_missing_driver_is_one_error() -> None:
    command = [sys.executable, "-c", WITHOUT.format(name="asyncpg"), "status", "--database"]
    done = subprocess.run(
        [*command, "postgresql://127.0.0.1/l"], env=ENVIRONMENT, capture_output=True, encoding="utf-8", check=False
    )
    message = "postgresql needs the package asyncpg: pip install 'genie-ledger[postgres]'"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"genie-ledger: {message}\n")
