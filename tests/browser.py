"""A browser in front of the page of the admin port, for tests: what stands there, and what it has asked for."""

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

from servers import WAIT_S, Genie

T = TypeVar("T")

NODES = "return [...document.querySelectorAll('#graph .node:not(.fold)')].map(node => node.dataset.id)"
TEXTS = "return [...document.querySelectorAll(arguments[0])].map(found => found.textContent)"
LINKS = """return [...document.querySelectorAll('#graph .link')].map(
    link => [link.dataset.from, link.dataset.to, link.classList[1]])"""


def ask(server: Genie, path: str) -> Any:
    """What the API answers."""
    with urllib.request.urlopen(address(server) + path, timeout=WAIT_S) as answer:  # noqa: S310 - of ours
        return json.load(answer)


def address(server: Genie) -> str:
    return f"http://127.0.0.1:{server.settings['admin_port']}/"


class Browser:
    def __init__(self, chrome: webdriver.Chrome) -> None:
        self.chrome = chrome

    def open(self, server: Genie | str) -> None:
        self.chrome.get(server if isinstance(server, str) else address(server))

    def forget(self) -> None:
        """Leave the page, and what it has logged."""
        self.chrome.get("about:blank")
        for kind in ("browser", "performance"):
            self.chrome.get_log(kind)

    def until(self, true: Callable[[], T]) -> T:
        """Wait until this is so. What is drawn anew meanwhile is looked up again."""
        return WebDriverWait(self.chrome, WAIT_S, 0.05, [StaleElementReferenceException]).until(lambda _: true())

    def all(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """Wait for it."""
        return self.until(lambda: self.all(selector))[0]

    def text(self, selector: str) -> str:
        return next(iter(self.texts(selector)), "")

    def texts(self, selector: str) -> list[str]:
        """Of all that there are at one moment: the page is drawn anew every second."""
        found: list[str] = self.chrome.execute_script(TEXTS, selector)
        return found

    def click(self, selector: str) -> None:
        """Click on it as soon as it is there, and once more if it was drawn anew meanwhile."""

        def clicked() -> bool:
            for found in self.all(selector)[:1]:
                found.click()
                return True
            return False

        self.until(clicked)

    def until_text(self, selector: str, part: str) -> None:
        self.until(lambda: part in self.text(selector))

    def nodes(self) -> set[int]:
        """Requests that are drawn, by id."""
        return {int(id_) for id_ in self.chrome.execute_script(NODES)}

    def links(self) -> set[tuple[str, int, int]]:
        """Their links: kind, from, to."""
        return {(kind, int(start), int(end)) for start, end, kind in self.chrome.execute_script(LINKS)}

    def press(self, key: str) -> None:
        """On the keyboard."""
        webdriver.ActionChains(self.chrome).send_keys(key).perform()

    def choose(self, id_: int) -> None:
        """Click on a node, and wait until that request is shown."""
        self.click(f'#graph .node[data-id="{id_}"]')
        self.until_shown(id_)

    def until_shown(self, id_: int) -> None:
        """Wait for all that there is to tell of a request: when it ends is known last, and moves what is below it."""
        self.until_text("#details code", str(id_))
        self.one("#details .ends")

    def enter(self, text: str) -> None:
        """Into the field that has the focus."""
        self.press(text + Keys.ENTER)

    def complaints(self) -> list[str]:
        """What the console says: errors of scripts, and what the security policy did not let happen."""
        return [entry["message"] for entry in self.chrome.get_log("browser")]

    def asked(self) -> set[str]:
        """Every URL that the page has asked for."""
        events = [json.loads(entry["message"])["message"] for entry in self.chrome.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return {params["request"]["url"] for params in sent}
