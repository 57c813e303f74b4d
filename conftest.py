"""For all tests, also those of the applications."""

import gc
import os

import pytest

from support.processes import programs
from support.processes.dispositions import restore_defaults_for_children
from support.runs.failures import pytest_configure
from support.runs.searches import load_profile

__all__ = ["pytest_configure"]

WITH_SERVERS = ("integration", "browser")
"""Folders all of whose tests are taken to start a server."""
FIXTURES = {"genie", "redis", "chromium", "server"}
"""Fixtures that do."""
DATABASES = {"postgres", "postgresql", "mariadb", "redis"}
"""Parameters of tests that do."""
LONG = {"test_work.py", "test_compiled.py"}
"""Files that are run first, because they take long and would be among the last: the other processes would wait for them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-servers", action="store_true", help="leave out the tests that start a server")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that start servers, and leave them out where that is wanted. The long files come first."""
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if _starts_a_server(item):
            item.add_marker("server")
    if config.getoption("--no-servers"):
        os.environ[programs.NO_SERVERS] = "1"
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("server")])
        items[:] = [item for item in items if not item.get_closest_marker("server")]


def _starts_a_server(item: pytest.Item) -> bool:
    parts = item.path.relative_to(item.config.rootpath).parts
    folder = parts[parts.index("tests") + 1]
    called = getattr(item, "callspec", None)
    values = [] if called is None else [value for value in called.params.values() if isinstance(value, str)]
    return (
        folder in WITH_SERVERS
        or bool(FIXTURES & {*getattr(item, "fixturenames", ())})
        or any(value.partition("-")[0] in DATABASES for value in values)
    )


def pytest_collection_finish() -> None:
    """Take all that was imported out of garbage collections: it stays, and to look through it again and again takes long."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what the tests of a file have left in caches."""
    if nextitem is not None and nextitem.path != item.path:
        gc.freeze()


load_profile()
restore_defaults_for_children()
