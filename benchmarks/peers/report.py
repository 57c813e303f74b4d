"""The report of a run: its results and its environment."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Sample, Summary, summarize
from genie import build

Samples = Mapping[str, Mapping[str, Sequence[Sample]]]
"""By the slug of the load, then by the name of the peer."""


@dataclass(frozen=True)
class Report:
    """The report of one run."""

    date: str
    machine: str
    pinning: str
    filesystem: str
    """The type of the filesystem of the temporary folder, where the servers store their data; empty
    if it is unknown.
    """
    rounds: int
    seconds: float
    warmup: float
    """Seconds of warm-up before each load."""
    versions: Sequence[str]
    skipped: Mapping[str, str]
    """By peer, why it was not measured."""
    samples: Samples

    def summaries(self, shape: str) -> dict[str, Summary]:
        """Return the summaries of the peers that were measured under a load, in their order."""
        return {name: summarize(found) for name, found in self.samples.get(shape, {}).items() if found}

    @property
    def measured(self) -> bool:
        """True if the report contains any result."""
        return any(self.summaries(shape) for shape in self.samples)

    @property
    def others(self) -> float:
        """The number of processors that unrelated processes have used."""
        return statistics.median(
            [s.others_share for shape in self.samples for s in self.summaries(shape).values()] or [0]
        )

    def json(self) -> str:
        """Return the whole report, with each round."""
        found: dict[str, Any] = dataclasses.asdict(self)
        found["summaries"] = {
            shape: {name: dataclasses.asdict(summary) for name, summary in self.summaries(shape).items()}
            for shape in self.samples
        }
        return json.dumps(found, indent=2)


def today() -> str:
    """Return the date, in UTC."""
    return dt.datetime.now(dt.UTC).date().isoformat()


def machine() -> str:
    """Describe the processors and the kernel, without identifying the machine."""
    kernel = re.match(r"[\d.]*\d", platform.release())
    model = re.search(r"^model name\s*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    processors = f"{os.cpu_count()} processors" + (f" ({model[1].strip()})" if model else "")
    return f"{processors}, {platform.system()} {kernel[0] if kernel else ''}, {build.interpreter()}"


def pinning(servers: int | None, load: int | None) -> str:
    """Describe the processors on which servers and load ran."""
    if servers is None:
        return "servers and load on the same processors"
    return f"servers on processor {servers}, load on processor {load}"


def filesystem(folder: Path, mounts: str | None = None) -> str:
    """Return the type of a folder's filesystem: ext4, tmpfs. `mounts` has the format of
    /proc/self/mounts.
    """
    folder, found, deepest = folder.resolve(), "", 0
    for line in (_text("/proc/self/mounts") if mounts is None else mounts).splitlines():
        _, where, kind = line.split()[:3]
        mount = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), where))
        if len(mount.parts) >= deepest and folder.is_relative_to(mount):  # the later one is on top
            found, deepest = kind, len(mount.parts)
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
