"""A ledger's tables and states. The code uses the names of the reference design; `Ledger` maps them
to the ledger's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sqlalchemy import BigInteger, Column, ForeignKey, Index, Integer, MetaData, Numeric, String, Table

from genie_ledger.times import Utc, utc_now

ID = BigInteger().with_variant(Integer, "sqlite")
"""64 bits everywhere; SQLite autoincrements only columns of type INTEGER."""

_OPTIONAL = {"optional": True}
"""`info` of columns that an existing table may lack: Genie creates them, and does not read them."""
_MYSQL = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
}
_GROWING_IDS = {"sqlite_autoincrement": True, **_MYSQL}
"""Options of tables whose ids must never be reused: the handler relies on growing ids."""


class LedgerTables:
    """The tables `transfer`, `state_change`, `segment`, `timeout` and `interval`, with the
    reference design's column names as keys.

    The tables `transfer` and `state_change` belong to the ledger, and are only read. The other
    tables belong to the handler. The reference design lacks the columns `fence` and `readValue` (of
    `segment`), `deliveredDate` and `stateChangeId` (of `transferTimeout`), and the table
    `timeoutInterval`. `names` maps the reference design's names to the ledger's names, where they
    differ. `zone` is the time zone of the expiration dates in `transfer` and `transferTimeout`;
    None for UTC.

    `readValue` is the id of the last state change that this handler has read; `value` differs if
    another implementation of the reference design has moved it. `stateChangeId` is the transfer's
    last state change when its row was inserted or delivered. It is NULL in rows of another
    implementation, which are checked once.
    """

    def __init__(self, names: Mapping[str, str], zone: ZoneInfo | None = None) -> None:
        self._names = names
        self._metadata = MetaData()
        self.transfer = self._table(
            "transfer",
            Column("transferId", String(36), primary_key=True),
            Column("amount", Numeric(18, 2), nullable=False, info=_OPTIONAL),
            Column("currencyId", String(3), nullable=False, info=_OPTIONAL),
            Column("expirationDate", Utc(zone), nullable=False),
            _created_date(),
            **_MYSQL,
        )
        self.state_change = self._table(
            "transferStateChange",
            Column("transferStateChangeId", ID, primary_key=True, autoincrement=True),
            Column("transferId", String(36), ForeignKey(self.transfer.c.transferId), nullable=False),
            Column("transferStateId", String(50), nullable=False),
            _created_date(),
            **_GROWING_IDS,
        )
        changes = self.state_change.c
        self._index("transferstatechange_last", changes.transferId, changes.transferStateChangeId)
        self.segment = self._table(
            "segment",
            Column("segmentId", Integer, primary_key=True, autoincrement=True),
            Column("segmentType", String(50), nullable=False),
            Column("enumeration", Integer, nullable=False, server_default="0"),
            Column("tableName", String(50), nullable=False),
            Column("value", BigInteger, nullable=False),
            Column("changedDate", Utc, nullable=False, server_default=utc_now()),
            Column("fence", BigInteger),
            Column("readValue", BigInteger),
            **_GROWING_IDS,
        )
        self.timeout = self._table(
            "transferTimeout",
            Column("transferTimeoutId", ID, primary_key=True, autoincrement=True),
            Column("transferId", String(36), ForeignKey(self.transfer.c.transferId), nullable=False),
            Column("expirationDate", Utc(zone), nullable=False),
            Column("createdDate", Utc, nullable=False, server_default=utc_now()),
            Column("deliveredDate", Utc),
            Column("stateChangeId", BigInteger),
            **_GROWING_IDS,
        )
        timeouts = self.timeout.c
        self._index("transfertimeout_transferid_unique", timeouts.transferId, unique=True)
        self._index("transfertimeout_due", timeouts.deliveredDate, timeouts.expirationDate)
        self._index("transfertimeout_unchecked", timeouts.stateChangeId, timeouts.transferTimeoutId)
        self.interval = self._table(
            "timeoutInterval",
            Column("timeoutIntervalId", ID, primary_key=True, autoincrement=True),
            Column("first", BigInteger, nullable=False),
            Column("last", BigInteger, nullable=False),
            Column("changes", Integer, nullable=False),
            Column("lookedDate", Utc, nullable=False),
            **_GROWING_IDS,
        )

    @property
    def all(self) -> tuple[Table, ...]:
        """All tables, in the order of their creation. `timeout` is the first of the handler's tables,
        because only its creation depends on the ledger, and MariaDB commits each CREATE TABLE.
        """
        return self.transfer, self.state_change, self.timeout, self.segment, self.interval

    @property
    def ledger_owned(self) -> tuple[Table, ...]:
        """The tables that the ledger writes, and the handler only reads."""
        return self.transfer, self.state_change

    def _table(self, name: str, *columns: Column[Any], **options: Any) -> Table:
        """Define a table with the ledger's names. The keys of its columns are the reference
        design's names.
        """
        for column in columns:
            column.key = column.name
            column.name = self._names.get(f"{name}.{column.name}", column.name)
        return Table(self._names.get(name, name), self._metadata, *columns, info={"reference_name": name}, **options)

    def _index(self, name: str, *columns: Column[Any], unique: bool = False) -> None:
        """Define an index of the columns' table. `name` is the reference design's name of the
        table, an underscore, and the purpose of the index.

        The index's name begins with the ledger's name of the table, because in PostgreSQL and
        SQLite the names of indexes must be unique in the whole schema.
        """
        table = columns[0].table
        purpose = name.partition("_")[2]
        Index(f"{table.name}_{purpose}".lower(), *columns, unique=unique)


def _created_date() -> Column[Any]:
    return Column("createdDate", Utc, nullable=False, server_default=utc_now(), info=_OPTIONAL)


def _reference_names(tables: LedgerTables) -> list[str]:
    """Return the reference design's names of all tables, and of all columns as `table.column`."""
    return [
        name
        for table in tables.all
        for name in (
            table.info["reference_name"],
            *(f"{table.info['reference_name']}.{column.key}" for column in table.columns),
        )
    ]


NAMES = tuple(_reference_names(LedgerTables({})))
"""The reference design's names of all tables, and of all columns as `table.column`."""


# -- a ledger's own names and states ----------------------------------------------------------------------

PROCESSING_STATES = ("RECEIVED_PREPARE", "RESERVED")
"""States in which a transfer can expire."""

FINAL_STATES = (
    "RECEIVED_FULFIL",
    "COMMITTED",
    "FAILED",
    "EXPIRED",
    "EXPIRED_PREPARED",
    "EXPIRED_RESERVED",
    "REJECTED",
    "ABORTED",
    "RESERVED_TIMEOUT",
    "RECEIVED_REJECT",
    "ABORTED_REJECTED",
    "ABORTED_ERROR",
    "INVALID",
    "SETTLED",
)
"""States in which a transfer is finished, and no longer tracked: those of the reference design, then
states that only Mojaloop's central-ledger has. A state that is in neither list is an unlisted state:
a transfer in it is neither delivered nor removed.
"""


class Ledger:
    """The tables of one ledger, and the meaning of its states.

    Args:
        names: Maps a table, or `table.column`, of the reference design to this ledger's name, where
            they differ: `{"transfer": "transfers", "transfer.expirationDate": "expires_at"}`.
        processing_states: The states in which a transfer can expire. States are compared by the
            database: under a case-insensitive collation `reserved` is `RESERVED`.
        final_states: The states in which a transfer is finished.
        time_zone: The IANA name of the zone of the expiration dates, such as "Africa/Nairobi".

    Raises:
        ValueError: A name is not one of the reference design, a state has two meanings, or the time
            zone is unknown.
    """

    def __init__(
        self,
        *,
        names: Mapping[str, str] | None = None,
        processing_states: Iterable[str] = PROCESSING_STATES,
        final_states: Iterable[str] = FINAL_STATES,
        time_zone: str = "UTC",
    ) -> None:
        mapping = dict(names or {})
        unknown = sorted(set(mapping) - set(NAMES))
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: no such table or column in the reference design; it has {', '.join(NAMES)}"
            )
        if not all(mapping.values()):
            raise ValueError(f"{', '.join(name for name in mapping if not mapping[name])}: a name can't be empty")
        _check_distinct(mapping)
        self.tables = LedgerTables(mapping, _load_zone(time_zone))
        self.processing_states = _check_states("processing_states", processing_states)
        self.final_states = _check_states("final_states", final_states)
        ambiguous = sorted(set(self.processing_states) & set(self.final_states))
        if ambiguous:
            raise ValueError(f"{', '.join(ambiguous)}: a state is final or in processing, not both")


def _check_distinct(names: Mapping[str, str]) -> None:
    """Raise ValueError if `names` gives two tables, or two columns of a table, the same name."""
    assigned: dict[tuple[str, str], str] = {}
    """The reference design's names. The key of a table is ("", the ledger's name), the key of a
    column is (table, the ledger's name).
    """
    for name in NAMES:
        table, _, column = name.partition(".")
        ledger_name = names.get(name, column or table)
        key = (table if column else "", ledger_name)
        if key in assigned:
            raise ValueError(f"{assigned[key]} and {name} can't both be called {ledger_name!r}")
        assigned[key] = name


def _load_zone(name: str) -> ZoneInfo | None:
    """Return the time zone with an IANA name; None for UTC, because no conversion is needed. Raises
    ValueError if the zone is unknown.
    """
    try:
        zone = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"time_zone: {name!r} is not a time zone of the IANA database, such as UTC, Europe/Berlin or Etc/GMT-3"
        ) from None
    return None if name == "UTC" else zone


def _check_states(parameter: str, states: Iterable[str]) -> tuple[str, ...]:
    """Return the states as a tuple. Raises ValueError, with the name of the `parameter`, unless
    they are one or more non-empty strings.
    """
    names = (states,) if isinstance(states, str) else tuple(states)
    if not names or not all(isinstance(state, str) and state for state in names):
        raise ValueError(f"{parameter}: must be one or more names of states, not {states!r}")
    return names
