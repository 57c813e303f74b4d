"""A later build of Genie, for tests of upgrades: a copy of the package whose records and `welcome` have one more field."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import genie
from support.processes.programs import NOWHERE, check_that_servers_may_start
from support.processes.servers import Genie, Redis

FIELD = "build"
"""The additional field of each held or waiting request."""
_RECORD_FIELD = "    details: StoredDetails | None = None\n"
_RECORD_ARGUMENT = "            None if request.details is None else _stored_details(request.details),\n"
_PATCHES = {
    "storage/redis/records.py": [
        (_RECORD_FIELD, f"{_RECORD_FIELD}    {FIELD}: str = ''\n"),
        (_RECORD_ARGUMENT, f"{_RECORD_ARGUMENT}            {FIELD}='later',\n"),
    ],
    "protocol/replies.py": [('        "server": server,\n', '        "server": server,\n        "build": "later",\n')],
}
"""By file: the texts that are replaced, each of which occurs once."""


def make_later_build(folder: Path) -> Path:
    """Copy the package to a folder, and add a field to its records; return the folder, from which the build can be run."""
    package = Path(genie.__file__).parent
    shutil.copytree(package, folder / "genie", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name, patches in _PATCHES.items():
        path = folder / "genie" / name
        text = path.read_text()
        for old, new in patches:
            assert text.count(old) == 1, f"{name} contains {text.count(old)} times: {old}"
            text = text.replace(old, new)
        path.write_text(text)
    return folder


class LaterGenie(Genie):
    """A `genie serve` process of the build in a folder."""

    def __init__(self, folder: Path, redis: Redis, **settings: object) -> None:
        super().__init__(redis, **settings)
        self._folder = folder

    def spawn(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        check_that_servers_may_start()
        return subprocess.Popen(
            [sys.executable, "-m", "genie.cli", "serve"],
            cwd=self._folder,
            env=NOWHERE | dict(environment) | {"PYTHONPATH": str(self._folder)},
            stdout=subprocess.PIPE,
        )
