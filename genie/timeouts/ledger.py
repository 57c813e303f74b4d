"""The tables, by the names of the document; a ledger's own names are beneath."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sqlalchemy import BigInteger, Column, ForeignKey, Index, Integer, MetaData, Numeric, String, Table

from genie.timeouts.times import Utc, utc_now

ID = BigInteger().with_variant(Integer, "sqlite")
"""Of 64 bits everywhere; SQLite gives numbers only to what is called INTEGER."""

_NOT_NEEDED = {"needed": False}
"""Of columns that a ledger may be without: only what we create has them."""
_MYSQL = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
}
_COUNTED = {"sqlite_autoincrement": True, **_MYSQL}
"""A number that was deleted is not given again: what is counted on is that they only grow."""


class LedgerTables:
    """`transfer`, `state_change`, `segment`, `timeout` and `interval`. Their columns have the document's names as keys.

    The first two are the ledger's: they are only read. The others are the handler's. `fence` and `readValue` (of
    `segment`), `handedOverDate` and `stateChangeId` (of `transferTimeout`) and the whole of `timeoutInterval` are not the
    document's. `zone`: in which the expiration dates are written, in both tables; UTC, if none.

    `readValue`: the state change up to which this handler has read; `value` is another one where another implementation
    of the document has moved it. `stateChangeId`: the last state change of the transfer when its row was inserted or
    handed over; NULL in rows of another implementation, which are checked once.
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
        """In the order in which they are created."""
        return self.transfer, self.state_change, self.segment, self.timeout, self.interval

    @property
    def of_ledger(self) -> tuple[Table, ...]:
        """Those that are the ledger's own."""
        return self.transfer, self.state_change

    def _table(self, name: str, *columns: Column[Any], **options: Any) -> Table:
        for column in columns:
            column.key = column.name
            column.name = self._names.get(f"{name}.{column.name}", column.name)
        return Table(self._names.get(name, name), self._metadata, *columns, info={"name": name}, **options)

    def _index(self, name: str, *columns: Column[Any], unique: bool = False) -> None:
        """By a name that no other ledger's index has: in PostgreSQL and SQLite they are one namespace."""
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


# -- How a ledger names its tables, columns and states --------

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
"""A transfer in one of these is not waited for any more. (In any other it is neither handed over nor forgotten.)"""


class Ledger:
    """The tables of one ledger, and what its states mean.

    `names` maps a table, or `table.column`, to what this ledger calls it, for those that it calls otherwise:
    `{"transfer": "transfers", "transfer.expirationDate": "expires_at"}`. States are compared as they are written.
    `time_zone` is the IANA name of the zone in which the ledger writes expiration dates, as in "Africa/Nairobi".
    ValueError, where a name is none of ours, a state means two things, or the time zone is unknown.
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
            raise ValueError(f"{', '.join(unknown)}: no name of a table or column; those are {', '.join(NAMES)}")
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
    """No two tables, and no two columns of one, may have the same name."""
    found: dict[tuple[str, str], str] = {}
    for name in NAMES:
        table, _, column = name.partition(".")
        place = (table if column else "", own.get(name, column or table))
        if place in found:
            raise ValueError(f"{found[place]} and {name} can't both be called {place[1]!r}")
        found[place] = name


def _zone(name: str) -> ZoneInfo | None:
    """None for UTC, which needs no conversion."""
    try:
        zone = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"time_zone: {name!r} is no time zone; one is named as in the IANA database: UTC, Europe/Berlin, Etc/GMT-3"
        ) from None
    return None if name == "UTC" else zone


def _states(field: str, states: Iterable[str]) -> tuple[str, ...]:
    found = (states,) if isinstance(states, str) else tuple(states)
    if not found or not all(isinstance(state, str) and state for state in found):
        raise ValueError(f"{field}: one or more names of states are needed, not {states!r}")
    return found
