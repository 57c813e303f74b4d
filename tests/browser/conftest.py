from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator

import pytest
from selenium import webdriver

from support.admin.browser import Browser
from support.network.wire import Wire


@pytest.fixture(autouse=True)
async def _close_wires() -> AsyncIterator[None]:
    yield
    while Wire.made:
        await Wire.made.pop().close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser for all tests of a module, because its start takes long."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert program, "chromium is needed: make test installs it"
    assert driver, "chromedriver (chromium-driver) is needed: make test installs it"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


@pytest.fixture
def browser(chromium: webdriver.Chrome) -> Iterator[Browser]:
    """A browser with an empty page and empty logs."""
    page = Browser(chromium)
    page.reset()
    yield page
    page.reset()
