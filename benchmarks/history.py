"""How long archiving the history and searching it take.

    python benchmarks/history.py [--events N]

A day with `--events` events (10,000,000) is written and archived, then searched by resource, by transaction and by windows;
median of several searches each. What recording costs: `python benchmarks/against.py --setting GENIE_HISTORY_DIR={folder}/history`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from genie.history import records  # noqa: E402
from genie.history.retention import SEGMENT_BYTES  # noqa: E402
from genie.history.search import Query, search  # noqa: E402
from genie.history.segments import archive_complete  # noqa: E402

DAY_MS = 86_400_000.0
RESOURCES = 1_000_000
CHUNK_LINES = 1_000


def write_day(directory: Path, events: int) -> None:
    """Write a day of requests as a server does: each is granted, every tenth waits before, and released 20 ms later."""
    random = Random(1)
    number, size, file = 0, 0, None
    lines: list[bytes] = []
    request_line = b'{"command":"request","payload":{"resources":["exclusive:%b"],"transactionName":"transfer-%d"}}'
    start = 1_764_000_000_000.0
    requests = int(events / 2.1)
    for index in range(requests):
        at = start + DAY_MS * index / requests
        id_ = int(at * 1000)
        name, transaction = f"accounts/{random.randrange(RESOURCES)}", index // 2
        if index % 10:
            lines.append(records.encode(records.Context(at, id_, id_)))
            lines.append(request_line % (name.encode(), transaction))
        else:
            queued = records.Queued(at, id_, (name,), (), f"transfer-{transaction}", waits_for=(id_ - 1,))
            lines += map(records.encode, (queued, records.Locked(at + 5, id_, id_)))
        lines.append(records.encode(records.Context(at + 20, id_ + 1, id_ + 1)))
        lines.append(b'{"command":"release","payload":{"id":%d}}' % id_)
        if len(lines) >= CHUNK_LINES or index == requests - 1:
            if file is None or size > SEGMENT_BYTES:
                number, size = number + 1, 0
                if file is not None:
                    file.close()
                file = (directory / f"20251124T000000.{number:06}Z-00000001-{number:06}.jsonl").open("wb")
                file.write(records.encode_lines([records.Opened(at, 1, "main", "bench", "00000001", number)]))
            size += file.write(b"\n".join(lines) + b"\n")
            lines = []
    assert file is not None  # noqa: S101 - there is at least one request
    file.close()


def searches(events: int) -> None:
    """Write and archive a day, and print how long searches take."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        began = time.perf_counter()
        write_day(directory, events)
        raw = sum(path.stat().st_size for path in directory.iterdir())
        wrote = time.perf_counter()
        archive_complete(directory)
        kept = sum(path.stat().st_size for path in directory.iterdir())
        print(
            f"{events:,} events: {raw / 1e6:,.0f} MB of lines, archived {kept / 1e6:,.0f} MB, written in {wrote - began:.0f} s, ",
            end="",
        )
        print(f"archived in {time.perf_counter() - wrote:.0f} s of one processor")
        random = Random(2)
        start = 1_764_000_000_000.0

        def window(hours: float) -> Query:
            since = start + random.uniform(0, DAY_MS - hours * 3_600_000)
            return Query(since=since, until=since + hours * 3_600_000, limit=10_000)

        kinds: dict[str, Callable[[], Query]] = {
            "by resource": lambda: Query(resource=f"accounts/{random.randrange(RESOURCES)}"),
            "by transaction": lambda: Query(transaction=f"transfer-{random.randrange(events // 5)}"),
            "a window of a minute": lambda: window(1 / 60),
            "a window of an hour": lambda: window(1),
        }
        for kind, make in kinds.items():
            took = []
            for _ in range(7):
                query, began = make(), time.perf_counter()
                found = len(search(directory, query).requests)
                took.append(time.perf_counter() - began)
            print(
                f"{kind:<22}{statistics.median(took):>8.3f} s, longest {max(took):.3f} s, {found:,} requests",
                flush=True,
            )


def main() -> None:
    """Measure archiving and searching."""
    parser = argparse.ArgumentParser(description="The duration of archiving and searching the history.")
    parser.add_argument("--events", type=int, default=10_000_000)
    options = parser.parse_args()
    searches(options.events)


if __name__ == "__main__":
    main()
