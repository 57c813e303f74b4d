"""Tokens as rows, and the pages that they are read in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import Row, Select, select, tuple_

from genie.tokens.stores.schema import TOKENS, UNSPENT
from genie.tokens.token import Token

PAGE = 1000
"""Tokens in a page of `unspent`."""

COLUMNS = [TOKENS.c[field.name] for field in fields(Token)]
"""What a token is made of, in the order in which it is made."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def row(token: Token) -> dict[str, Any]:
    """A token as the values of its row."""
    values = {column.name: getattr(token, column.name) for column in COLUMNS}
    values["metadata"] = _encode(dict(token.metadata)) if token.metadata else "{}"
    return values


def token(row: Row[Any]) -> Token:
    """The token of a row that was selected by `COLUMNS`, of which the metadata is the last."""
    plain: list[Any]
    *plain, metadata = row
    values = [*plain, {} if metadata == "{}" else json.loads(metadata)]
    return Token(*values)


def unspent_page(wanted: Mapping[str, str], after: Token | None) -> Select[Any]:
    """The unspent tokens whose columns have the wanted values, those behind `after`: at most a page.

    They come in the order of an index, of which a page is a stretch, whatever is wanted and however many were spent.
    """
    whose = "account" if "account" in wanted else "owner"
    order = [TOKENS.c[name] for name in ("token_type", "identifier", whose, "id") if name not in wanted]
    query = select(*COLUMNS).where(UNSPENT, *(TOKENS.c[name] == value for name, value in wanted.items()))
    if after is not None:
        query = query.where(tuple_(*order) > tuple_(*(getattr(after, column.name) for column in order)))
    return query.order_by(*order).limit(PAGE)
