"""Reading the log: about as many bytes at a time, whatever the size of its entries."""

from __future__ import annotations

import pytest

from genie.storage.redis.log import MAX_READ_BYTES, MAX_READ_ENTRIES, EpochHistory, LogReader, LogTruncated


class ScriptedLog:
    """Stands in for the primary: has a log of batches of one size, in the epoch 1."""

    def __init__(self, size: int) -> None:
        self.batch = b"0 1 1".ljust(size)
        self.counts: list[int] = []
        """The COUNT of each XREAD."""

    async def call(self, *command: object, wait_s: float) -> object:
        assert command[:2] == ("XREAD", "COUNT"), (command, wait_s)
        count, index = int(str(command[2])), int(str(command[-1]).partition("-")[2])
        self.counts.append(count)
        return [(b"log", [(b"1-%d" % (index + 1 + number), [b"batch", self.batch]) for number in range(count)])]


@pytest.mark.parametrize(
    ("size", "count"), [(50, MAX_READ_ENTRIES), (MAX_READ_BYTES // 10, 9), (2 * MAX_READ_BYTES, 1)]
)
async def test_a_read_is_bounded_in_bytes(size: int, count: int) -> None:
    log = ScriptedLog(size)
    reader = LogReader(log, "log")  # type: ignore[arg-type]
    reader.seek(EpochHistory(((0, 0), (1, 0))))
    for _ in range(3):
        await reader.read(None)
    assert log.counts[0] < 20, "the size of the entries is not known yet"
    assert log.counts[1:] == [count, count]


async def test_the_entries_before_a_gap_are_returned_and_the_next_read_reports_the_gap() -> None:
    """Otherwise a replica would lack them, although its reader is behind them."""

    class LogWithGap(ScriptedLog):
        async def call(self, *command: object, wait_s: float) -> object:
            del wait_s
            index = int(str(command[-1]).partition("-")[2])
            present = [number for number in (1, 2, 4, 5) if number > index]
            return [(b"log", [(b"1-%d" % number, [b"batch", self.batch]) for number in present])]

    reader = LogReader(LogWithGap(50), "log")  # type: ignore[arg-type]
    reader.seek(EpochHistory(((0, 0), (1, 0))))
    assert [entry.position for entry in await reader.read(None)] == [(1, 1), (1, 2)]
    with pytest.raises(LogTruncated):
        await reader.read(None)
    assert reader.position == (1, 2)


async def test_an_empty_entry_of_another_program_is_a_gap() -> None:
    class ForeignLog(ScriptedLog):
        async def call(self, *command: object, wait_s: float) -> object:
            del command, wait_s
            return [(b"log", [(b"1-1", [b"", b""])])]

    reader = LogReader(ForeignLog(50), "log")  # type: ignore[arg-type]
    reader.seek(EpochHistory(((0, 0), (1, 0))))
    with pytest.raises(LogTruncated):
        await reader.read(None)
