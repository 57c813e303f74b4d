"""A browser that shows the status page, for tests: its texts and nodes, and the URLs that it has requested."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from support.processes.servers import WAIT_S, Genie

T = TypeVar("T")

NODES = "return [...document.querySelectorAll('#graph .node:not(.collapsed)')].map(node => node.dataset.id)"
TEXTS = "return [...document.querySelectorAll(arguments[0])].map(element => element.textContent)"
LINKS = """return [...document.querySelectorAll('#graph .link')].map(
    link => [link.dataset.from, link.dataset.to, link.classList[1]])"""


def ask(server: Genie, path: str) -> Any:
    """Return the response of the API."""
    with urllib.request.urlopen(address(server) + path, timeout=WAIT_S) as answer:  # noqa: S310 - a server of this test
        return json.load(answer)


def address(server: Genie) -> str:
    return f"http://127.0.0.1:{server.settings['admin_port']}/"


class Browser:
    def __init__(self, chrome: webdriver.Chrome) -> None:
        self.chrome = chrome

    def open(self, server: Genie | str) -> None:
        self.chrome.get(server if isinstance(server, str) else address(server))

    def reset(self) -> None:
        """Open an empty page, and drop the logs."""
        self.chrome.get("about:blank")
        for kind in ("browser", "performance"):
            self.chrome.get_log(kind)

    def until(self, condition: Callable[[], T]) -> T:
        """Wait until a condition is met. It is repeated if an element was replaced meanwhile."""
        return WebDriverWait(self.chrome, WAIT_S, 0.05, [StaleElementReferenceException]).until(lambda _: condition())

    def all(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """Wait for an element, and return it."""
        return self.until(lambda: self.all(selector))[0]

    def text(self, selector: str) -> str:
        return next(iter(self.texts(selector)), "")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements at one moment: the page is updated every second."""
        texts: list[str] = self.chrome.execute_script(TEXTS, selector)
        return texts

    def click(self, selector: str) -> None:
        """Wait for an element and click on it; repeat if it was replaced meanwhile."""

        def clicked() -> bool:
            for element in self.all(selector)[:1]:
                element.click()
                return True
            return False

        self.until(clicked)

    def until_text(self, selector: str, part: str) -> None:
        self.until(lambda: part in self.text(selector))

    def nodes(self) -> set[int]:
        """Return the ids of the requests that are drawn."""
        return {int(id_) for id_ in self.chrome.execute_script(NODES)}

    def links(self) -> set[tuple[str, int, int]]:
        """Return the links: kind, from, to."""
        return {(kind, int(start), int(end)) for start, end, kind in self.chrome.execute_script(LINKS)}

    def press(self, key: str) -> None:
        """Press a key."""
        webdriver.ActionChains(self.chrome).send_keys(key).perform()

    def select(self, id_: int) -> None:
        """Click on a node, and wait until its request is shown."""
        self.click(f'#graph .node[data-id="{id_}"]')
        self.until_shown(id_)

    def until_shown(self, id_: int) -> None:
        """Wait until all details of a request are shown: its timeout is known last, and moves what is below it."""
        self.until_text("#details code", str(id_))
        self.one("#details .ends")

    def enter(self, text: str) -> None:
        """Type a text and Enter into the field with the focus."""
        self.press(text + Keys.ENTER)

    def console_messages(self) -> list[str]:
        """Return the messages of the console: errors of scripts, and violations of the security policy."""
        return [entry["message"] for entry in self.chrome.get_log("browser")]

    def requested_urls(self) -> set[str]:
        """Return the URLs that the page has requested since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.chrome.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return {params["request"]["url"] for params in sent}
