"""The section `[ledger]` of the configuration file: what it describes, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from genie.cli import main
from genie.cli.configuration import ConfigurationError
from genie_ledger import FINAL_STATES, PROCESSING_STATES
from genie_ledger.cli.ledger_file import KEYS, read_ledger
from genie_ledger.ledger import NAMES

OWN_LEDGER = """
[ledger]
processing_states = ["pending", "held"]
final_states = ["paid"]
time_zone = "Africa/Nairobi"

[ledger.transfer]
table = "payments"
transferId = "id"
expirationDate = "expires_at"

[ledger.transferTimeout]
transferId = "payment_id"
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def errors_of(text: str) -> list[str]:
    Path("genie.toml").write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        read_ledger("genie.toml")
    assert all(error.startswith("genie.toml: ") for error in raised.value.errors)
    return [error.removeprefix("genie.toml: ") for error in raised.value.errors]


def test_a_ledger_with_names_states_and_a_time_zone() -> None:
    Path("genie.toml").write_text(OWN_LEDGER)
    ledger = read_ledger("genie.toml")
    transfer, timeout = ledger.tables.transfer, ledger.tables.timeout
    assert (transfer.name, transfer.c.transferId.name, transfer.c.expirationDate.name) == (
        "payments",
        "id",
        "expires_at",
    )
    assert (timeout.name, timeout.c.transferId.name) == ("transferTimeout", "payment_id")
    assert ledger.tables.state_change.name == "transferStateChange"
    assert (ledger.processing_states, ledger.final_states) == (("pending", "held"), ("paid",))
    assert str(transfer.c.expirationDate.type.zone) == "Africa/Nairobi"


def test_an_empty_section_is_the_default_ledger() -> None:
    Path("genie.toml").write_text("[ledger]\n[ledger.transfer]\n")
    ledger = read_ledger("genie.toml")
    assert (ledger.processing_states, ledger.final_states) == (PROCESSING_STATES, FINAL_STATES)
    assert {table.name for table in ledger.tables.all} == set(KEYS)


def test_every_name_has_a_key() -> None:
    assert {table if key == "table" else f"{table}.{key}" for table in KEYS for key in KEYS[table]} == set(NAMES)
    assert not any(name.endswith(".table") for name in NAMES)


def test_all_errors_are_listed() -> None:
    text = """
    [ledger]
    final_state = ["paid"]
    processing_states = "pending"
    time_zone = 3
    [ledger.transfer]
    tabel = "payments"
    transferId = 7
    [ledger.transfers]
    table = "payments"
    """
    assert errors_of(text) == [
        "ledger.final_state: unknown key; did you mean ledger.final_states?",
        "ledger.processing_states: must be an array of states, such as [\"RESERVED\"], not 'pending'",
        "ledger.time_zone: must be a string, not 3",
        "ledger.transfer.tabel: unknown key; did you mean ledger.transfer.table?",
        "ledger.transfer.transferId: must be a string, not 7",
        "ledger.transfers: unknown key; did you mean ledger.transfer?",
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("port = 7077\n", "has no section [ledger], which describes the ledger"),
        ("ledger = 5\n", "has no section [ledger], which describes the ledger"),
        ("[ledger]\ntransfer = 'payments'\n", "ledger.transfer: must be a section, [ledger.transfer]"),
        ("[ledger]\nfinal_states = []\n", "[ledger]: final_states: must be one or more names of states, not []"),
        ("[ledger]\nfinal_states = ['RESERVED']\n", "[ledger]: RESERVED: a state is final or in processing, not both"),
        ("[ledger]\ntime_zone = 'Mars'\n", "[ledger]: time_zone: 'Mars' is not a time zone of the IANA database, "),
        ("[ledger.transfer]\ntable = ''\n", "[ledger]: transfer: a name can't be empty"),
        ("[ledger\n", "is not TOML: "),
    ],
)
def test_an_invalid_section(text: str, error: str) -> None:
    (found,) = errors_of(text)
    assert found.startswith(error)


def test_a_file_that_does_not_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"^none\.toml: can't be read: No such file or directory$"):
        read_ledger("none.toml")


def test_the_server_ignores_the_section() -> None:
    Path("genie.toml").write_text(f"port = 7177\n{OWN_LEDGER}")
    assert CliRunner().invoke(main, ["config", "check", "--config", "genie.toml"]).output == "genie.toml: valid\n"
    Path("genie.toml").write_text("ledger = 5\n")
    assert "ledger: unknown key" in CliRunner().invoke(main, ["config", "check", "--config", "genie.toml"]).output
