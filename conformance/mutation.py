"""Mutation testing: copies of Genie with one known defect each, which the cases or the simulation must detect."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutant:
    """One defect: in `file` of the package `genie`, `text`, which occurs exactly once, is replaced by `replacement`."""

    name: str
    file: str
    text: str
    replacement: str
    source: str = ""
    """For the conformance cases: a rule number for a defect of the client, or a section of protocol.md for the server."""
    first: int = 1
    """For the simulation: the first seed."""

    def __str__(self) -> str:
        return f"{self.source}: {self.name}" if self.source else self.name


class NotRunError(Exception):
    """A mutant that shows nothing, because its text is not found, or because it cannot be run."""


@contextmanager
def mutated(mutant: Mutant, *packages: str) -> Iterator[Path]:
    """Copy packages of the repository, `genie` among them, to a folder in which Genie has the defect; yield the folder."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        for package in packages:
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        file = folder / "genie" / mutant.file
        source = file.read_text(encoding="utf-8")
        if source.count(mutant.text) != 1:
            raise NotRunError(f"DOES NOT APPLY: its text occurs {source.count(mutant.text)} times in {mutant.file}")
        file.write_text(source.replace(mutant.text, mutant.replacement), encoding="utf-8")
        yield folder


def environment(folder: Path) -> dict[str, str]:
    """Return the environment for the code in a folder, without settings of Genie."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    return inherited | {"PYTHONPATH": str(folder)}


def main(mutants: Sequence[Mutant], detect: Callable[[Mutant], str], description: str | None) -> int:
    """Run the mutants that the command line names, or all. Print what detects each; return 1 if one is not detected.

    `detect` returns what detects a mutant, or "" if it survives, and may raise NotRunError.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="part of a mutant's name, or its rule or section")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time (2)")
    options = parser.parse_args()
    selected = [
        mutant
        for mutant in mutants
        if not options.names or any(name in mutant.name or name == mutant.source for name in options.names)
    ]
    if not selected:
        print("no mutant has such a name; there are", *(f"    {mutant}" for mutant in mutants), sep="\n")
        return 2

    def outcome(mutant: Mutant) -> tuple[bool, str]:
        try:
            detected_by = detect(mutant)
        except NotRunError as error:
            return False, str(error)
        return bool(detected_by), detected_by or "SURVIVES"

    undetected = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, (is_detected, text) in zip(selected, pool.map(outcome, selected), strict=True):
            undetected += not is_detected
            print(f"{mutant}\n    {text}", flush=True)
    print(f"{len(selected)} mutants, {undetected} not detected")
    return 1 if undetected else 0
