"""A ledger's tables and states. The code uses the names of the document; `Ledger` maps them to the
ledger's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sqlalchemy import BigInteger, Column, ForeignKey, Index, Integer, MetaData, Numeric, String, Table

from genie.timeouts.times import Utc, utc_now

ID = BigInteger().with_variant(Integer, "sqlite")
"""64 bits everywhere; SQLite autoincrements only columns of type INTEGER."""

_NOT_NEEDED = {"needed": False}
"""Info of columns that a ledger may lack: only tables that we create have them."""
_MYSQL = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
}
_COUNTED = {"sqlite_autoincrement": True, **_MYSQL}
"""Options of tables whose ids must never be reused: the handler relies on growing ids."""


class LedgerTables:
    """`transfer`, `state_change`, `segment`, `timeout` and `interval`, with the document's column
    names as keys.

    The first two are the ledger's, and only read. The others are the handler's. Not in the document
    are `fence` and `readValue` (of `segment`), `handedOverDate` and `stateChangeId` (of
    `transferTimeout`) and the table `timeoutInterval`. `zone` is the time zone of the expiration
    dates in both tables; None for UTC.

    `readValue` is the last state change that this handler has read; `value` differs if another
    implementation of the document has moved it. `stateChangeId` is the transfer's last state change
    when its row was inserted or delivered; NULL in rows of another implementation, which are
    checked once.
    """

    def __init__(self, names: Mapping[str, str], zone: ZoneInfo | None = None) -> None:
        self._names = names
        self._metadata = MetaData()
        self.transfer = self._table(
            "transfer",
            Column("transferId", String(36), primary_key=True),
            Column("amount", Numeric(18, 2), nullable=False, info=_NOT_NEEDED),
            Column("currencyId", String(3), nullable=False, info=_NOT_NEEDED),
            Column("expirationDate", Utc(zone), nullable=False),
            _created(),
            **_MYSQL,
        )
        self.state_change = self._table(
            "transferStateChange",
            Column("transferStateChangeId", ID, primary_key=True, autoincrement=True),
            Column("transferId", String(36), ForeignKey(self.transfer.c.transferId), nullable=False),
            Column("transferStateId", String(50), nullable=False),
            _created(),
            **_COUNTED,
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
            **_COUNTED,
        )
        self.timeout = self._table(
            "transferTimeout",
            Column("transferTimeoutId", ID, primary_key=True, autoincrement=True),
            Column("transferId", String(36), ForeignKey(self.transfer.c.transferId), nullable=False),
            Column("expirationDate", Utc(zone), nullable=False),
            Column("createdDate", Utc, nullable=False, server_default=utc_now()),
            Column("handedOverDate", Utc),
            Column("stateChangeId", BigInteger),
            **_COUNTED,
        )
        waiting = self.timeout.c
        self._index("transfertimeout_transferid_unique", waiting.transferId, unique=True)
        self._index("transfertimeout_due", waiting.handedOverDate, waiting.expirationDate)
        self._index("transfertimeout_unchecked", waiting.stateChangeId, waiting.transferTimeoutId)
        self.interval = self._table(
            "timeoutInterval",
            Column("timeoutIntervalId", ID, primary_key=True, autoincrement=True),
            Column("first", BigInteger, nullable=False),
            Column("last", BigInteger, nullable=False),
            Column("changes", Integer, nullable=False),
            Column("lookedDate", Utc, nullable=False),
            **_COUNTED,
        )

    @property
    def all(self) -> tuple[Table, ...]:
        """All tables, in the order of their creation."""
        return self.transfer, self.state_change, self.segment, self.timeout, self.interval

    @property
    def of_ledger(self) -> tuple[Table, ...]:
        """The ledger's own tables."""
        return self.transfer, self.state_change

    def _table(self, name: str, *columns: Column[Any], **options: Any) -> Table:
        for column in columns:
            column.key = column.name
            column.name = self._names.get(f"{name}.{column.name}", column.name)
        return Table(self._names.get(name, name), self._metadata, *columns, info={"name": name}, **options)

    def _index(self, name: str, *columns: Column[Any], unique: bool = False) -> None:
        """Create an index with a name that is unique to the table: PostgreSQL and SQLite have one
        namespace for all.
        """
        table = columns[0].table
        own = f"{table.name}_{name.partition('_')[2]}".lower()
        Index(own, *columns, unique=unique)


def _created() -> Column[Any]:
    return Column("createdDate", Utc, nullable=False, server_default=utc_now(), info=_NOT_NEEDED)


def _named(tables: LedgerTables) -> list[str]:
    return [
        name
        for table in tables.all
        for name in (table.info["name"], *(f"{table.info['name']}.{column.key}" for column in table.columns))
    ]


NAMES = tuple(_named(LedgerTables({})))
"""All tables, and all columns as `table.column`."""


# -- a ledger's own names and states ----------------------------------------------------------------------

PROCESSING_STATES = ("RECEIVED_PREPARE", "RESERVED")
"""A transfer in one of these can expire."""

FINAL_STATES = (
    "RECEIVED_FULFIL",
    "COMMITTED",
    "FAILED",
    "EXPIRED",
    "EXPIRED_PREPARED",
    "EXPIRED_RESERVED",
    "REJECTED",
    "ABORTED",
)
"""A transfer in one of these is no longer tracked. (In any other state it is neither delivered nor
removed.)
"""


class Ledger:
    """The tables of one ledger, and the meaning of its states.

    Args:
        names: Maps a table, or `table.column`, of the document to this ledger's name, where they differ:
            `{"transfer": "transfers", "transfer.expirationDate": "expires_at"}`.
        processing_states: The states in which a transfer can expire. States are compared as written.
        final_states: The states in which a transfer is finished.
        time_zone: The IANA name of the zone of the expiration dates, such as "Africa/Nairobi".

    Raises:
        ValueError: A name is not one of the document's, a state has two meanings, or the time zone
            is unknown.
    """

    def __init__(
        self,
        *,
        names: Mapping[str, str] | None = None,
        processing_states: Iterable[str] = PROCESSING_STATES,
        final_states: Iterable[str] = FINAL_STATES,
        time_zone: str = "UTC",
    ) -> None:
        own = dict(names or {})
        unknown = sorted(set(own) - set(NAMES))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not a table or column; those are {', '.join(NAMES)}")
        if not all(own.values()):
            raise ValueError(f"{', '.join(name for name in own if not own[name])}: a name can't be empty")
        _check_distinct(own)
        self.tables = LedgerTables(own, _zone(time_zone))
        self.processing_states = _states("processing_states", processing_states)
        self.final_states = _states("final_states", final_states)
        both = sorted(set(self.processing_states) & set(self.final_states))
        if both:
            raise ValueError(f"{', '.join(both)}: a state is final or in processing, not both")


def _check_distinct(own: Mapping[str, str]) -> None:
    """Raise ValueError if two tables, or two columns of a table, have the same name."""
    found: dict[tuple[str, str], str] = {}
    for name in NAMES:
        table, _, column = name.partition(".")
        place = (table if column else "", own.get(name, column or table))
        if place in found:
            raise ValueError(f"{found[place]} and {name} can't both be called {place[1]!r}")
        found[place] = name


def _zone(name: str) -> ZoneInfo | None:
    """Return a time zone; None for UTC, which needs no conversion."""
    try:
        zone = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"time_zone: {name!r} is not a time zone of the IANA database, such as UTC, Europe/Berlin or Etc/GMT-3"
        ) from None
    return None if name == "UTC" else zone


def _states(field: str, states: Iterable[str]) -> tuple[str, ...]:
    found = (states,) if isinstance(states, str) else tuple(states)
    if not found or not all(isinstance(state, str) and state for state in found):
        raise ValueError(f"{field}: must be one or more names of states, not {states!r}")
    return found
