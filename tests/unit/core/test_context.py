"""The context of a request is opaque to the lock manager."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import genie.core
from genie.core import Context, Request, context_of, shown_note
from genie.core.context import shown_context
from genie.storage.store import StoredOrigin

FIELDS = {"ref", *(field.name for field in fields(Context))}
READERS = {"context.py", "size.py"}
"""`size.py` measures texts for the server."""


def test_the_lock_manager_reads_nothing_of_the_context() -> None:
    modules = [path for path in Path(genie.core.__file__).parent.rglob("*.py") if path.name not in READERS]
    assert len(modules) > 15
    reads = {
        (path.name, node.attr)
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in FIELDS
    } - {("model.py", "ref"), ("commands.py", "ref")}  # only assigned
    assert reads == set()


def test_requests_without_texts_of_their_own_share_a_context() -> None:
    first, second = context_of("orders"), Context().with_principal("orders")
    assert first is second
    noted = Context(note="nightly").with_principal("orders")
    assert (noted.principal, noted.note) == ("orders", "nightly")


def test_operators_see_the_note_of_the_session_unless_the_request_has_one() -> None:
    session = StoredOrigin("key", 0, "program@host")
    own, other = Request(origin=session, context=Context("p", "own")), Request(origin=session, context=Context("p"))
    assert [shown_note(own), shown_note(other), shown_note(Request())] == ["own", "program@host", None]
    assert shown_context(own) is own.context
    assert shown_context(other) == Context("p", "program@host")
