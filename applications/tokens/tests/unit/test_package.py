"""Imports of the package, and errors for wrong arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest

import genie
from genie_tokens import InMemorySelector, MemoryTokenStore, SherdlockSelector, SqlTokenStore
from support.processes.servers import WAIT_S


def test_it_is_loaded_by_name() -> None:
    program = (
        "import sys, genie_tokens\n"
        "assert genie_tokens.MemoryTokenStore and 'sqlalchemy' not in sys.modules\n"
        "sys.modules['sqlalchemy'] = None\n"
        "try:\n"
        "    genie_tokens.SqlTokenStore\n"
        "except ModuleNotFoundError as error:\n"
        "    assert 'genie-tokens[sqlite]' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('it is there')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=WAIT_S)


@pytest.mark.parametrize(
    ("url", "driver", "extra"),
    [("sqlite+aiosqlite:///a.db", "aiosqlite", "sqlite"), ("postgresql+asyncpg://u@h/d", "asyncpg", "postgres")],
)
def test_without_its_driver_a_store_names_the_extra(
    url: str, driver: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, driver, None)  # as if it were not installed
    with pytest.raises(
        ModuleNotFoundError, match=rf"needs the package {driver}: pip install 'genie-tokens\[{extra}\]'"
    ):
        SqlTokenStore(url)


def test_sherdlock_rejects_a_blocking_client() -> None:
    with pytest.raises(TypeError, match="asyncio"):
        SherdlockSelector(genie.sync.connect(), MemoryTokenStore())  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [{}, {"transaction": "t", "target": 1, "tokens": [{"id": "x"}]}])
async def test_an_invalid_checkpoint_is_rejected(data: dict[str, object]) -> None:
    async with InMemorySelector(MemoryTokenStore()) as selector:
        with pytest.raises(ValueError, match="checkpoint"):
            await selector.restore(data)
