"""The page of a server with several namespaces: it shows the one in its URL, and a selection of the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver.support.select import Select

from support.admin.browser import Browser, address
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import Genie, running_redis, running_server

LONG = {"queueTimeout": 600_000, "transactionTimeout": 600_000}


@pytest.fixture
def genie() -> Iterator[Genie]:
    with running_server(admin_port=free_port(), namespaces="orders,billing") as genie:
        yield genie


def options(browser: Browser) -> list[str]:
    return browser.texts("#namespace option")


async def test_the_selected_namespace_is_part_of_the_url(genie: Genie, browser: Browser) -> None:
    wire = await Wire.connect(genie.address)
    wire.send("hello", namespace="billing")
    await wire.expect("welcome")
    held = await wire.lock("exclusive:a", transactionName="t1", **LONG)
    waits = await wire.request("exclusive:a", **LONG)
    browser.open(genie)
    browser.until(lambda: options(browser) == ["orders", "billing"])
    assert browser.one("#namespace").is_displayed()
    assert browser.chrome.title == "orders · Genie"
    assert browser.nodes() == set()
    Select(browser.one("#namespace")).select_by_value("billing")
    browser.until(lambda: browser.chrome.current_url == address(genie) + "?namespace=billing")
    browser.until(lambda: browser.nodes() == {held, waits})
    assert browser.chrome.title == "billing · Genie"
    browser.chrome.refresh()
    browser.until(lambda: browser.nodes() == {held, waits})
    assert Select(browser.one("#namespace")).first_selected_option.text == "billing"
    browser.select(held)
    browser.until_text("#details", "Holdsexclusive a")
    browser.click("#details .danger")
    browser.click("#release .confirm")
    browser.until_text("#release .result", "Released")
    assert (await wire.expect("released"))["id"] == held
    assert (await wire.expect("locked"))["id"] == waits
    browser.chrome.back()
    browser.until(lambda: browser.chrome.title == "orders · Genie")
    assert Select(browser.one("#namespace")).first_selected_option.text == "orders"
    assert browser.console_messages() == []


async def test_a_follower_names_the_leader_and_a_leader_shows_its_locks(browser: Browser) -> None:
    with running_redis() as redis:
        for namespace in ("orders", "billing"):
            redis.create_namespace(namespace)
        with (
            running_server(redis, namespaces="orders", lease=600) as other,
            running_server(redis, namespaces="orders,billing", admin_port=free_port(), lease=600) as genie,
        ):
            browser.open(genie)
            browser.until_text("#notice", f"follows 127.0.0.1:{other.port}, the leader")
            browser.until(lambda: options(browser) == ["orders (follower)", "billing"])
            Select(browser.one("#namespace")).select_by_value("billing")
            browser.until(lambda: browser.one("#main").is_displayed())
            assert not browser.one("#notice").is_displayed()


async def test_an_unknown_namespace(genie: Genie, browser: Browser) -> None:
    browser.open(address(genie) + "?namespace=stock")
    browser.until_text("#notice", "unknown namespace 'stock'; this server serves orders, billing")
    assert not browser.one("#main").is_displayed()
