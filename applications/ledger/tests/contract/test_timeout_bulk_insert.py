"""Bulk inserts that bypass SQLAlchemy: values arrive unchanged."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import delete, select

from genie_ledger import Ledger
from genie_ledger.schema import open_ledger
from ledgers import Books

TEXT = "'; -- % %s ? \\' \\ \" \n \t :x é"
WHEN = datetime(2026, 1, 31, 12, 0, 0, 125_000, UTC)


async def test_any_text_is_inserted_unchanged(books: Books) -> None:
    transfer = Ledger().tables.transfer
    async with open_ledger(books.url, Ledger()) as database:
        for mode in ("", "NO_BACKSLASH_ESCAPES") if books.kind == "mariadb" else ("",):
            rows = [
                {"expirationDate": WHEN, "transferId": f"{number}{TEXT}", "amount": number, "currencyId": "%s\\"}
                for number in range(5_001)
            ]
            async with database.writing() as connection:
                if books.kind == "mariadb":
                    await connection.exec_driver_sql(f"SET SESSION sql_mode = '{mode}'")
                await connection.execute(delete(transfer))
                await database.insert_rows(connection, transfer, [])
                await database.insert_rows(connection, transfer, rows)
                columns = [transfer.c[key] for key in rows[0]]
                found = await connection.execute(select(*columns).order_by(transfer.c.amount))
                assert [dict(zip(rows[0], row, strict=True)) for row in found] == rows
