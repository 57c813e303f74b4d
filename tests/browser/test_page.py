"""The page of the admin port in a real browser, in front of a real server: it shows what is so, and does what it says."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import ClientSession, web
from selenium.webdriver.common.keys import Keys

from browser import Browser, address, ask
from genie.admin.endpoints import PageFiles
from ports import free_port
from servers import WAIT_S, Genie, running_redis, running_server
from wire import Wire

LONG = {"queueTimeout": 600_000, "transactionTimeout": 600_000, "onDisconnect": "release"}
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def genie() -> Iterator[Genie]:
    with running_server(admin_port=free_port()) as genie:
        yield genie


@pytest.fixture
def server(genie: Genie) -> Genie:
    """One that holds nothing. What the tests ask for ends with their connections."""
    end = time.monotonic() + WAIT_S
    while any(ask(genie, "api/state")[key] for key in ("held", "waiting", "connections")):
        assert time.monotonic() < end, "the last test has left something"
        time.sleep(0.05)
    return genie


@pytest.fixture
def mortal() -> Iterator[Genie]:
    """One that may be ended."""
    with running_server(admin_port=free_port()) as genie:
        yield genie


async def line(wire: Wire, name: str, many: int) -> list[int]:
    """The ids of one that holds `name` and of those that wait for it, in their order."""
    held = await wire.lock(f"exclusive:{name}", transactionName=f"{name}-0", **LONG)
    others = [
        await wire.request(f"exclusive:{name}", transactionName=f"{name}-{n}", **LONG) for n in range(1, many + 1)
    ]
    return [held, *others]


def figure(browser: Browser, key: str) -> str:
    return browser.text(f'[data-figure="{key}"] strong')


# -- what it shows --------------------------------------------------------------------------------------------


async def test_it_shows_what_the_api_says(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    first, second, third = await line(wire, "accounts/2", 2)
    await wire.lock("exclusive:x", "shared:y", **LONG)
    browser.open(server)
    browser.until(lambda: len(browser.nodes()) == 3)
    told = ask(server, "api/waits")
    assert browser.nodes() == {node["id"] for node in told["nodes"]} == {first, second, third}
    assert browser.links() == {(edge["state"], edge["waiter"], edge["blocker"]) for edge in told["edges"]}
    assert browser.links() == {("held", second, first), ("held", third, first), ("queued", third, second)}
    counted = {"locks": 3, "held": 2, "waiting": 2, "connections": 1}
    browser.until(lambda: ask(server, "api/state").items() >= counted.items())
    browser.until(lambda: [figure(browser, key) for key in ("locks", "waiting", "connections")] == ["3", "2", "1"])
    assert browser.text("#graph-count") == "2 requests wait"
    browser.until(lambda: browser.text("#lines tbody tr").startswith("accounts/22"))


async def test_waiting_for_a_holder_and_behind_somebody_look_different(server: Genie, browser: Browser) -> None:
    await line(await Wire.connect(server.address), "a", 2)
    browser.open(server)
    browser.one(".link.queued[data-from]")
    dashes = [
        browser.one(f".link.{kind}[data-from]").value_of_css_property("stroke-dasharray") for kind in ("held", "queued")
    ]
    assert dashes[0] == "none"
    assert dashes[1] != "none"
    assert browser.texts("#legend li") == [
        "waits for who holds it",
        "waits behind who is next ahead",
        "the same transaction",
    ]


async def test_of_a_line_each_is_linked_with_the_next_ahead(server: Genie, browser: Browser) -> None:
    ids = await line(await Wire.connect(server.address), "a", 5)
    browser.open(server)
    browser.until(lambda: browser.nodes() == set(ids))
    behind = {("queued", later, ahead) for later, ahead in zip(ids[2:], ids[1:-1], strict=True)}
    assert browser.links() == {("held", waiter, ids[0]) for waiter in ids[1:]} | behind


async def test_what_one_transaction_holds_and_waits_for_belongs_together(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    first = await wire.lock("exclusive:a", transactionName="first", **LONG)
    holds = await wire.lock("exclusive:b", transactionName="second", **LONG)
    waits = await wire.request("exclusive:a", transactionName="second", **LONG)
    last = await wire.request("shared:b", transactionName="third", **LONG)
    browser.open(server)
    browser.until(lambda: browser.nodes() == {first, holds, waits, last})
    assert browser.links() == {("held", waits, first), ("held", last, holds), ("same", holds, waits)}


async def test_it_follows_what_happens(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    browser.open(server)
    browser.until(lambda: figure(browser, "locks") == "0")
    assert not browser.one("#namespace").is_displayed(), "there is one only"
    assert browser.texts("#server span")[:3] == ["genie", "leader", "in memory"]
    first, second, third = await line(wire, "a", 2)
    browser.until(lambda: browser.nodes() == {first, second, third})
    await wire.release(first)
    browser.until(lambda: browser.links() == {("held", third, second)})
    await wire.expect("locked")
    await wire.release(second)
    browser.until(lambda: not browser.nodes())
    assert browser.one("#graph .empty").is_displayed()
    browser.until(lambda: figure(browser, "waiting") == "0")


async def test_a_deadlock_is_drawn_as_a_ring(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    browser.open(server)
    browser.one("#deadlocks-card")
    names = ["one", "two", "three"]
    for name in names:
        await wire.lock(f"exclusive:of-{name}", transactionName=name, **LONG)
    for name, other in zip(names, ["two", "three", "one"], strict=True):
        last = await wire.request(f"exclusive:of-{other}", transactionName=name, **LONG)
    assert (await wire.expect("released"))["reason"] == "deadlock"
    ring = f'.ring[data-id="{last}"]'
    browser.one(ring)
    assert browser.texts(f"{ring} .member text") == ["three", "one", "two"]
    assert browser.texts(f"{ring} .victim text") == ["three"]
    wanted = [text.partition("of-")[0] + text[: len(text) // 2] for text in browser.texts(f"{ring} .wanted")]
    assert wanted == ["of-one", "of-two", "of-three"]
    assert len(browser.all(f"{ring} .ring-link")) == 3


async def test_a_node_shows_its_request(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    held, waits, _ = await line(wire, "accounts/2", 2)
    browser.open(server)
    browser.choose(waits)
    details = browser.text("#details")
    for part in (
        f"Id{waits}",
        "Transactionaccounts/2-1",
        "Asks forexclusive accounts/2",
        "accounts/2-0 holds exclusive",
    ):
        assert part in details
    assert browser.texts("#details .waits-for-this li") == ["accounts/2-2"]
    browser.until_text("#details", "Gives up in9 min")
    browser.one(f'.node[data-id="{held}"]').send_keys(Keys.ENTER)
    browser.until_shown(held)
    assert "Holdsexclusive accounts/2" in browser.text("#details")
    browser.click("#details .list .name")
    browser.until(lambda: len(browser.all("#details .queue li")) == 2)
    assert [text.partition(" ")[0] for text in browser.texts("#details .holders li")] == ["accounts/2-0"]
    browser.press(Keys.ESCAPE)
    browser.until(lambda: not browser.one("#details").is_displayed())


async def test_what_ended_is_shown_as_ended(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    held, waits = await line(wire, "a", 1)
    browser.open(server)
    browser.choose(waits)
    browser.until_text("#details .badge", "waits")
    await wire.release(waits)
    browser.until_text("#details .badge", "has ended")
    assert not browser.all("#details .danger")
    browser.click("#details .close")
    assert not browser.all(f'.node[data-id="{held}"]')


# -- what it does ---------------------------------------------------------------------------------------------


async def test_a_release_asks_first_and_tells_what_came_of_it(server: Genie, browser: Browser) -> None:
    holder, other = await Wire.connect(server.address), await Wire.connect(server.address)
    held = await holder.lock("exclusive:accounts/2", transactionName="transfer-42", **LONG)
    waits = await other.request("exclusive:accounts/2", **LONG)
    browser.open(server)
    browser.choose(held)
    for refuse in (lambda: browser.click("#release .buttons button"), lambda: browser.press(Keys.ESCAPE)):
        browser.click("#details .danger")
        told = browser.text("#release")
        for part in (str(held), "transfer-42", "exclusive:accounts/2", "only notified that the lock was released"):
            assert part in told
        assert browser.chrome.switch_to.active_element.text == "Keep it"
        refuse()
        browser.until(lambda: not browser.one("#release").is_displayed())
    assert [node["id"] for node in ask(server, "api/waits")["nodes"]] == [waits, held]
    browser.click("#details .danger")
    browser.click("#release .confirm")
    browser.until_text("#release .result", "Released")
    assert await holder.expect("released") == {"id": held, "reason": "success"}
    assert (await other.expect("locked"))["id"] == waits
    browser.click("#release .buttons button")
    browser.until(lambda: not browser.nodes())


async def test_a_release_that_comes_too_late_says_so(mortal: Genie, browser: Browser) -> None:
    wire = await Wire.connect(mortal.address)
    _, waits = await line(wire, "a", 1)
    browser.open(mortal)
    browser.choose(waits)
    browser.click("#details .danger")
    mortal.kill()
    browser.click("#release .confirm")
    browser.until_text("#release .result", "The outcome is unknown")
    mortal.start()
    browser.until_text("#pulse", "Live")
    browser.click("#release .confirm")
    browser.until_text("#release .result", f"there is no request {waits}")


# -- whoever it shows -----------------------------------------------------------------------------------------


async def test_names_are_only_text(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    for transaction, (mine, others) in {f"1{HOSTILE}": ("1", "2"), f"2{HOSTILE}": ("2", "1")}.items():
        await wire.lock(f"exclusive:{mine}{HOSTILE}", transactionName=transaction, **LONG)
        if mine == "2":
            await wire.request(
                "exclusive:1" + HOSTILE, transactionName="</text><script>alert(1)</script>\u202eback", **LONG
            )
            for first, second in ((f"1{HOSTILE}", others + HOSTILE), (f"2{HOSTILE}", mine + HOSTILE)):
                await wire.request(
                    f"exclusive:{'2' if second[0] == '1' else '1'}{HOSTILE}", transactionName=first, **LONG
                )
    browser.open(server)
    browser.one(".ring")
    browser.until(lambda: HOSTILE in browser.text("#lines"))
    browser.until(lambda: HOSTILE in browser.text("#hot"))
    browser.until(lambda: browser.nodes() == {node["id"] for node in ask(server, "api/waits")["nodes"]})
    for id_ in browser.nodes():
        browser.choose(id_)
    browser.until_text("#details dl", "1")
    browser.click("#details .danger")
    assert HOSTILE in browser.text("#release")
    assert len(browser.all("img")) == 1
    assert len(browser.all("script")) == 1
    assert "</text><script>alert(1)</script>\u2039202E\u203aback" in browser.text("#graph")
    assert browser.chrome.title == "genie · Genie"
    assert browser.complaints() == []


async def test_nothing_is_asked_of_anybody_else(server: Genie, browser: Browser) -> None:
    _, waits = await line(await Wire.connect(server.address), "a", 1)
    browser.open(server)
    browser.choose(waits)
    asked: set[str] = set()

    def asked_for_its_resource() -> bool:
        asked.update(browser.asked())
        return address(server) + "api/resources/a" in asked

    browser.until(asked_for_its_resource)
    assert {url for url in asked if not url.startswith(address(server))} == set()
    assert browser.complaints() == []


async def test_a_large_graph_is_drawn_in_part(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    for batch in range(100):
        names = [f"exclusive:big/{batch}/{n}" for n in range(100)]
        await wire.lock(*names, transactionName=f"batch-{batch}" * 20, **LONG)
    for n in range(300):
        await wire.request(f"exclusive:big/{n % 40 if n < 200 else 99}/0", transactionName=f"waiter-{n}", **LONG)
    browser.open(server)
    browser.until(lambda: (figure(browser, "locks"), figure(browser, "waiting")) == ("10,000", "300"))
    browser.until_text("#graph-count", "300 requests wait")  # what it shows was asked for one after the other
    nodes, links = browser.all("#graph .node"), browser.links()
    assert 20 <= len(nodes) <= 60
    assert len(links) <= 200
    drawn = sum(int(each.split()[0]) for each in browser.texts("#graph .fold .name"))
    drawn += len(browser.all("#graph .node.queued:not(.fold)"))
    assert browser.text("#graph-count") == f"300 requests wait; {300 - drawn} of them not drawn"
    assert len(browser.all("#lines tbody tr")) == 20
    browser.click('#lines tr[data-resource="big/99/0"] .name')
    browser.until(lambda: len(browser.all("#details .queue li")) == 20)
    assert "and 80 more" in browser.text("#details")
    assert browser.complaints() == []


async def test_many_that_are_alike_are_one_node(server: Genie, browser: Browser) -> None:
    ids = await line(await Wire.connect(server.address), "a", 20)
    browser.open(server)
    browser.until(lambda: browser.texts("#graph .fold .name") == ["16 more wait"])
    assert browser.nodes() == set(ids[:5])
    assert browser.text("#graph-count") == "20 requests wait"
    browser.click("#graph .fold")
    browser.until(lambda: len(browser.all("#details .queue li")) == 20)


# -- when it can't show it ------------------------------------------------------------------------------------


async def test_a_server_that_is_away_is_said_to_be_and_found_again(mortal: Genie, browser: Browser) -> None:
    browser.open(mortal)
    browser.until_text("#pulse", "Live")
    mortal.kill()
    browser.until_text("#notice", "The server is unreachable")
    assert "Retrying" in browser.text("#pulse")
    mortal.start()
    browser.until_text("#pulse", "Live")
    assert not browser.one("#notice").is_displayed()


async def test_one_that_follows_names_the_leader(browser: Browser) -> None:
    with (
        running_redis() as redis,
        running_server(redis, admin_port=free_port(), lease=600) as leader,
        running_server(redis, admin_port=free_port(), lease=600) as follower,
    ):
        browser.open(follower)
        browser.until_text("#notice", f"follows 127.0.0.1:{leader.port}, the leader")
        assert not browser.one("#main").is_displayed()


async def test_a_token_is_asked_for_kept_and_sent(server: Genie, browser: Browser) -> None:
    async with guarded(server) as url:
        await asyncio.to_thread(_with_tokens, browser, url)


def _with_tokens(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.until(lambda: browser.one("#sign-in").is_displayed())
    browser.until(lambda: browser.chrome.switch_to.active_element.get_attribute("id") == "token")
    browser.enter("wrong")
    browser.until_text("#sign-in-why", "nobody knows this token")
    browser.enter("right")
    browser.until_text("#pulse", "Live")
    assert not browser.one("#sign-in").is_displayed()
    browser.chrome.refresh()
    browser.until_text("#pulse", "Live")
    browser.chrome.execute_script("sessionStorage.setItem('genie-token', 'blind')")
    browser.until_text("#notice", "needs the right to read")


class guarded:  # noqa: N801 - a context manager
    """A door in front of a server's admin port that asks for tokens."""

    def __init__(self, server: Genie) -> None:
        self.behind = address(server)

    async def __aenter__(self) -> str:
        self.session = ClientSession()
        app = web.Application()
        app.add_routes(PageFiles().routes())
        app.add_routes([web.get("/api/{rest:.*}", self.api)])
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}/"

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()
        await self.session.close()

    async def api(self, request: web.Request) -> web.Response:
        said = request.headers.get("Authorization")
        if said == "Bearer blind":
            return web.json_response({"code": "unauthorized", "message": "it needs the right to read"}, status=403)
        if said != "Bearer right":
            return web.json_response({"code": "unauthorized", "message": "nobody knows this token"}, status=401)
        async with self.session.get(self.behind + request.path_qs.lstrip("/")) as answer:
            return web.json_response(await answer.json())


# -- its files ------------------------------------------------------------------------------------------------


def fetch(url: str, **headers: str) -> Any:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_S) as answer:  # noqa: S310
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.status, error.headers, b""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("", "text/html"), ("page.js", "text/javascript"), ("page.css", "text/css"), ("favicon.svg", "image/svg+xml")],
)
def test_its_files_say_what_they_are_and_what_they_may(server: Genie, path: str, kind: str) -> None:
    status, headers, body = fetch(address(server) + path)
    assert status == 200
    assert headers["Content-Type"] == f"{kind}; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert body
    assert fetch(address(server) + path, **{"If-None-Match": headers["ETag"]})[0] == 304
    assert b"style=" not in body
    assert b"innerHTML" not in body
