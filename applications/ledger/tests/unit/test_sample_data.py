"""Sample data: generated, shifted and finalized ledgers, checked by queries of SQLite."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from genie_ledger import ExpiredTransfer, Ledger, TimeoutHandler, WrongSchema
from genie_ledger.sample_data import DataSet, finalize, generate, shift, transfers
from genie_ledger.schema import open_ledger
from genie_ledger.status import Status, status
from ledger_queries import overdue, query

LEDGER = Ledger()
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
STATES = "SELECT transferId, group_concat(transferStateId, ' ') FROM transferStateChange GROUP BY transferId"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def url(file: Path) -> str:
    return f"sqlite:///{file}"


async def fill(file: Path, data_set: DataSet) -> None:
    async with open_ledger(url(file), LEDGER, create=True) as database:
        await generate(database, LEDGER, data_set)


async def run_handler(file: Path, *rejected: str) -> list[ExpiredTransfer]:
    """Run the handler once; return the delivered transfers, of which it rejects some."""
    delivered: list[ExpiredTransfer] = []

    def on_expired(expired: list[ExpiredTransfer]) -> list[str]:
        delivered.extend(expired)
        return list(rejected)

    async with TimeoutHandler(url(file), on_expired=on_expired) as handler:
        await handler.run_once()
    return delivered


async def test_the_requested_number_expires_and_no_other_transfer_within_an_hour(file: Path) -> None:
    progress: list[tuple[int, int]] = []
    async with open_ledger(url(file), LEDGER, create=True) as database:
        changes = await generate(
            database, LEDGER, DataSet(transfers=25_000, expired=41, seed=1), lambda *numbers: progress.append(numbers)
        )
    assert progress == [(number, 25_000) for number in (5_000, 10_000, 15_000, 20_000, 25_000)]
    assert len(overdue(file)) == 41
    assert {state for _, state in overdue(file)} == {"RECEIVED_PREPARE", "RESERVED"}
    assert overdue(file, "+59 minutes") == overdue(file)
    assert 2_500 < len(overdue(file, "+170 hours")) < 3_000
    assert not overdue(file, "-168 hours")
    assert query(file, "SELECT COUNT(*) FROM transferStateChange") == [changes]
    assert 3.4 < changes / 25_000 < 3.6
    assert query(file, "SELECT MIN(amount), MAX(amount) FROM transfer") == [(1, 100)]
    assert query(file, "SELECT DISTINCT currencyId FROM transfer ORDER BY 1") == ["EUR", "USD", "ZAR"]


async def test_each_transfer_has_the_states_that_lead_to_its_last_state(file: Path) -> None:
    await fill(file, DataSet(transfers=3_000, expired=30, seed=1))
    found = Counter(states for _, states in query(file, STATES))
    begin = "RECEIVED_PREPARE RESERVED"
    others = {f"{begin} {state}" for state in LEDGER.final_states if state != "COMMITTED"}
    assert set(found) == {"RECEIVED_PREPARE", begin, f"{begin} RECEIVED_FULFIL COMMITTED", *others}
    assert found.most_common(1)[0][0] == f"{begin} RECEIVED_FULFIL COMMITTED"


def test_a_seed_determines_the_transfers() -> None:
    data_set = DataSet(transfers=500, expired=7, seed=5)
    again = list(transfers(data_set, LEDGER, NOW))
    assert list(transfers(data_set, LEDGER, NOW)) == again
    later = list(transfers(data_set, LEDGER, NOW + timedelta(days=1)))
    assert [one._replace(expires=one.expires - timedelta(days=1)) for one in later] == again
    more = list(transfers(DataSet(transfers=900, expired=9, seed=5), LEDGER, NOW))
    assert [one.transfer_id for one in more[:500]] == [one.transfer_id for one in again]
    other = list(transfers(DataSet(transfers=500, expired=7, seed=6), LEDGER, NOW))
    assert not {one.transfer_id for one in other} & {one.transfer_id for one in again}


async def test_generating_the_same_seed_twice_fails_and_changes_nothing(file: Path) -> None:
    await fill(file, DataSet(transfers=20, expired=2, seed=5))
    before = query(file, STATES)
    with pytest.raises(ValueError, match="has transfers of seed 5 already"):
        await fill(file, DataSet(transfers=50, expired=2, seed=5))
    assert query(file, STATES) == before
    await fill(file, DataSet(transfers=20, expired=2, seed=6))
    assert len(overdue(file)) == 4


async def test_a_ledger_with_custom_names_and_states(file: Path) -> None:
    ledger = Ledger(
        names={"transfer": "payments", "transfer.transferId": "id", "transferStateChange.transferStateId": "state"},
        processing_states=["OPEN"],
        final_states=["DONE"],
    )
    query(
        file, "CREATE TABLE payments (id VARCHAR(36) PRIMARY KEY, amount INT, currencyId TEXT, expirationDate DATETIME)"
    )
    columns = "transferStateChangeId INTEGER PRIMARY KEY AUTOINCREMENT, transferId VARCHAR(36), state TEXT"
    query(file, f"CREATE TABLE transferStateChange ({columns})")
    query(file, "CREATE INDEX changes ON transferStateChange (transferId)")
    async with open_ledger(url(file), ledger, create=True) as database:
        await generate(database, ledger, DataSet(transfers=300, expired=3, seed=1))
        assert (await status(database, ledger)).lag == len(query(file, "SELECT state FROM transferStateChange"))
    assert query(file, "SELECT COUNT(*) FROM payments") == [300]
    assert set(query(file, "SELECT DISTINCT state FROM transferStateChange")) == {"OPEN", "DONE"}


async def test_a_ledger_without_a_written_column_is_rejected(file: Path) -> None:
    query(file, "CREATE TABLE transfer (transferId VARCHAR(36) PRIMARY KEY, amount INT, expirationDate DATETIME)")
    columns = "transferStateChangeId INTEGER PRIMARY KEY AUTOINCREMENT, transferId TEXT, transferStateId TEXT"
    query(file, f"CREATE TABLE transferStateChange ({columns})")
    query(file, "CREATE INDEX changes ON transferStateChange (transferId)")
    with pytest.raises(WrongSchema, match="table transfer has no column currencyId"):
        await fill(file, DataSet(transfers=10, expired=1, seed=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"expired": 11},
        {"expired": -1},
        {"amount": (2, 1)},
        {"amount": (-1, 1)},
        {"hours": (2, 1)},
        {"hours": (0, float("nan"))},
        {"hours": (0, 1e9)},
        {"currencies": ()},
        {"currencies": ("USD", "")},
    ],
)
def test_invalid_data_sets_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"expired|amount|hours|currencies"):
        DataSet(**{"transfers": 10, "expired": 1, "seed": 1} | wrong)


@pytest.mark.parametrize("hours", [3.5, -170])
async def test_shift_moves_all_dates(file: Path, hours: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genie_ledger.sample_data.SHIFT_CHUNK_SIZE", 7)
    await fill(file, DataSet(transfers=50, expired=5, seed=1))
    query(
        file, "UPDATE transfer SET expirationDate = 'never' WHERE transferId IN (SELECT MIN(transferId) FROM transfer)"
    )
    dates = "SELECT transferId, expirationDate FROM transfer"
    before, progress = dict(query(file, dates)), []
    async with open_ledger(url(file), LEDGER, create=True) as database:
        moved = await shift(database, LEDGER, timedelta(hours=hours), lambda *numbers: progress.append(numbers))
    assert moved == 50
    assert progress == [(number, 50) for number in (7, 14, 21, 28, 35, 42, 49, 50)]

    def later(date: str) -> str:
        return (datetime.fromisoformat(date) + timedelta(hours=hours)).isoformat(" ", "milliseconds")

    assert dict(query(file, dates)) == {
        transfer: date if date == "never" else later(date) for transfer, date in before.items()
    }


async def test_finalize_writes_one_final_state_for_each_tracked_transfer(file: Path) -> None:
    await fill(file, DataSet(transfers=300, expired=5, seed=1))
    first, *_ = late = await run_handler(file, overdue(file)[0][0])
    waiting = len(overdue(file, "+1000 hours"))
    async with open_ledger(url(file), LEDGER, create=True) as database:
        assert await finalize(database, LEDGER, limit=1) == 1
        last = "SELECT transferId, transferStateId FROM transferStateChange ORDER BY transferStateChangeId DESC LIMIT 1"
        assert query(file, last) == [(first.transfer_id, "ABORTED")]
        assert await finalize(database, LEDGER, "EXPIRED", overdue=True) == len(late) - 1 == 4
        assert not overdue(file)
        assert await finalize(database, LEDGER) == waiting - 5
        assert await finalize(database, LEDGER) == 0
        for wrong in ("RESERVED", "aborted"):
            with pytest.raises(ValueError, match=f"'{wrong}' is not a final state; those are RECEIVED_FULFIL, "):
                await finalize(database, LEDGER, wrong)
        with pytest.raises(ValueError, match="limit must be at least 1, not 0"):
            await finalize(database, LEDGER, limit=0)
    assert not overdue(file, "+1000 hours")


async def test_status_reports_the_progress_of_the_handler(file: Path) -> None:
    async with open_ledger(url(file), LEDGER, create=True) as database:
        empty = Status(segment=0, last=0, lag=0, pending=0, overdue=0, delivered=0, unlisted={})
        assert await status(database, LEDGER) == empty
        changes = await generate(database, LEDGER, DataSet(transfers=300, expired=5, seed=1))
        waiting = len(overdue(file, "+1000 hours"))
        assert await status(database, LEDGER) == Status(
            segment=0, last=changes, lag=changes, pending=0, overdue=0, delivered=0, unlisted={}
        )
        await run_handler(file, *[transfer for transfer, _ in overdue(file)[:2]])
        read = Status(segment=changes, last=changes, lag=0, pending=waiting - 3, overdue=2, delivered=3, unlisted={})
        assert await status(database, LEDGER) == read
        await finalize(database, LEDGER, overdue=True)
        read = Status(
            segment=changes, last=changes + 5, lag=5, pending=waiting - 3, overdue=0, delivered=3, unlisted={}
        )
        assert await status(database, LEDGER) == read
