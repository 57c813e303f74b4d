"""The status page in a real browser, of a real server: what it shows, its actions, and its errors."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from selenium.webdriver.common.keys import Keys

from genie.admin.endpoints import PageFiles
from genie.history.search import Query, search
from genie.text import is_printable
from support.admin.browser import Browser, address, ask
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, running_redis, running_server
from support.processes.waiting import wait_until

LONG = {"queueTimeout": 600_000, "transactionTimeout": 600_000, "onDisconnect": "release"}
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def genie() -> Iterator[Genie]:
    with running_server(admin_port=free_port()) as genie:
        yield genie


@pytest.fixture
def server(genie: Genie) -> Genie:
    """A server without requests: those of a test end with its connections."""
    wait_until(lambda: not any(ask(genie, "api/state")[key] for key in ("held", "waiting", "connections")))
    return genie


@pytest.fixture
def killable() -> Iterator[Genie]:
    """A server that the test may kill."""
    with running_server(admin_port=free_port()) as genie:
        yield genie


async def make_queue(wire: Wire, name: str, waiters: int) -> list[int]:
    """Lock a resource, and let requests wait for it. Return the ids: the holder, then the waiters in order."""
    held = await wire.lock(f"exclusive:{name}", transactionName=f"{name}-0", **LONG)
    others = [
        await wire.request(f"exclusive:{name}", transactionName=f"{name}-{n}", **LONG) for n in range(1, waiters + 1)
    ]
    return [held, *others]


def figure(browser: Browser, key: str) -> str:
    return browser.text(f'[data-figure="{key}"] strong')


# -- contents --------------------------------------------------------------------------------------------


async def test_it_shows_the_response_of_the_api(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    first, second, third = await make_queue(wire, "accounts/2", 2)
    await wire.lock("exclusive:x", "shared:y", **LONG)
    browser.open(server)
    browser.until(lambda: len(browser.nodes()) == 3)
    graph = ask(server, "api/waits")
    assert browser.nodes() == {node["id"] for node in graph["nodes"]} == {first, second, third}
    assert browser.links() == {(edge["state"], edge["waiter"], edge["blocker"]) for edge in graph["edges"]}
    assert browser.links() == {("held", second, first), ("held", third, first), ("queued", third, second)}
    counted = {"locks": 3, "held": 2, "waiting": 2, "connections": 1}
    browser.until(lambda: ask(server, "api/state").items() >= counted.items())
    browser.until(lambda: [figure(browser, key) for key in ("locks", "waiting", "connections")] == ["3", "2", "1"])
    assert browser.text("#graph-count") == "2 requests wait"
    browser.until(lambda: browser.text("#queues tbody tr").startswith("accounts/22"))


async def test_links_to_holders_are_solid_and_links_to_the_queue_dashed(server: Genie, browser: Browser) -> None:
    await make_queue(await Wire.connect(server.address), "a", 2)
    browser.open(server)
    browser.one(".link.queued[data-from]")
    dashes = [
        browser.one(f".link.{kind}[data-from]").value_of_css_property("stroke-dasharray") for kind in ("held", "queued")
    ]
    assert dashes[0] == "none"
    assert dashes[1] != "none"
    legend = ["waits for the holder", "waits for the request ahead in the queue", "same transaction"]
    assert [item.text for item in browser.all("#legend li") if item.is_displayed()] == legend


async def test_each_waiter_is_linked_with_the_next_ahead(server: Genie, browser: Browser) -> None:
    ids = await make_queue(await Wire.connect(server.address), "a", 5)
    browser.open(server)
    browser.until(lambda: browser.nodes() == set(ids))
    queued = {("queued", later, ahead) for later, ahead in zip(ids[2:], ids[1:-1], strict=True)}
    assert browser.links() == {("held", waiter, ids[0]) for waiter in ids[1:]} | queued


async def test_requests_of_one_transaction_are_linked(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    first = await wire.lock("exclusive:a", transactionName="first", **LONG)
    holds = await wire.lock("exclusive:b", transactionName="second", **LONG)
    waits = await wire.request("exclusive:a", transactionName="second", **LONG)
    last = await wire.request("shared:b", transactionName="third", **LONG)
    browser.open(server)
    browser.until(lambda: browser.nodes() == {first, holds, waits, last})
    assert browser.links() == {("held", waits, first), ("held", last, holds), ("same", holds, waits)}


async def test_a_node_without_a_transaction_shows_its_note(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    await wire.lock("exclusive:a", note="nightly", **LONG)
    await wire.request("exclusive:a", transactionName="transfer-7", note="worker 7", **LONG)
    last = await wire.request("exclusive:a", **LONG)
    browser.open(server)
    browser.until(lambda: len(browser.nodes()) == 3)
    assert sorted(browser.texts("#graph .node .name")) == sorted([f"#{last}", "(nightly)", "transfer-7"])


BARS = """return [...document.querySelectorAll('#graph .node')].map(node => [
    Number(node.dataset.id), node.querySelector('.resource').textContent,
    ...[...node.querySelectorAll('.units:not([hidden])')].map(bar => bar.getBoundingClientRect().width)])"""
BRACKETS = """const box = (element) => element.getBoundingClientRect();
return [...document.querySelectorAll('#graph .bracket')].map(bracket => [
    bracket.dataset.subtree, bracket.querySelector('text:not([hidden])')?.textContent,
    [...document.querySelectorAll('#graph .node')].filter(node => {
        const [inner, outer] = [box(node), box(bracket.querySelector('path'))];
        return inner.top >= outer.top - 2 && inner.bottom <= outer.bottom + 2 && inner.right < outer.left;
    }).map(node => Number(node.dataset.id)).sort()])"""


async def test_units_are_drawn_as_bars(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    holder = await wire.lock("6/8:pool", **LONG)
    waiter = await wire.request("4/8:pool", "exclusive:a", **LONG)
    browser.open(server)
    browser.until(lambda: browser.nodes() == {holder, waiter})
    bars = {row[0]: row[1:] for row in browser.chrome.execute_script(BARS)}
    assert [bars[holder][0], bars[waiter][0]] == ["6/8 pool", "4/8 pool +1"]
    for id_, share in (holder, 0.75), (waiter, 0.5):
        limit, units = bars[id_][1:]
        assert units == pytest.approx(limit * share, rel=0.02)
    assert browser.one("#legend li:nth-child(4)").text == "units, and how many may be in use"
    assert not browser.one("#legend li:nth-child(5)").is_displayed()
    assert browser.texts("#requests tbody td:first-child") == ["6/8 pool"]
    browser.click("#queues td button")
    browser.until_text("#details", "6 of 8 units in use")


async def test_a_subtree_is_drawn_as_a_bracket_over_its_names(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    inside = await wire.lock("exclusive:t/1", **LONG)
    subtree = await wire.request("exclusive:t/**", **LONG)
    late = [await wire.request(f"exclusive:t/{name}", **LONG) for name in (2, 3)]
    beside = [await wire.lock("exclusive:u/1", **LONG), await wire.request("shared:u/1", **LONG)]
    ids = {inside, subtree, *late, *beside}
    browser.open(server)
    browser.until(lambda: browser.nodes() == ids)
    assert browser.chrome.execute_script(BRACKETS) == [["t/**", "t/**", sorted({inside, subtree, *late})]]
    names = {row[0]: row[1] for row in browser.chrome.execute_script(BARS)}
    assert [names[id_] for id_ in (inside, subtree, *late)] == ["t/1", "t/**", "t/2", "t/3"], "what each one asked for"
    assert browser.one("#legend li:nth-child(5)").text == "names below a subtree"
    browser.click(".bracket text")
    browser.until_text("#details .holders", f"#{inside} exclusive t/1")
    browser.until_text("#details .queue li", f"#{subtree} exclusive, ")
    browser.until(lambda: len(browser.all("#details .queue li")) == 3)


async def test_it_is_updated(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    browser.open(server)
    browser.until(lambda: figure(browser, "locks") == "0")
    assert not browser.one("#namespace").is_displayed(), "the server has only one namespace"
    assert browser.texts("#server span")[:3] == ["genie", "leader", "in memory"]
    first, second, third = await make_queue(wire, "a", 2)
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


async def test_a_deadlock_over_units_says_how_many(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    await wire.lock("2/3:of-units", transactionName="one", **LONG)
    await wire.lock("exclusive:of-names/1", transactionName="two", **LONG)
    await wire.request("exclusive:of-names/**", transactionName="one", **LONG)
    last = await wire.request("2/3:of-units", transactionName="two", **LONG)
    assert (await wire.expect("released"))["reason"] == "deadlock"
    browser.open(server)
    browser.one(f'.ring[data-id="{last}"]')
    wanted = browser.texts(f'.ring[data-id="{last}"] .wanted title')
    assert wanted == ["2/3:of-units", "of-names/1"]


async def test_an_inversion_of_the_lock_order_is_described(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    browser.open(server)
    for names in (("inverted/1", "order/1"), ("order/2", "inverted/2")):
        held = [await wire.lock(f"exclusive:{name}", transactionName=names[0]) for name in names]
        for id_ in held:
            await wire.release(id_)
    browser.until(
        lambda: "order/* and inverted/* are locked in both orders" in browser.texts(".inversion .description")
    )
    assert browser.texts(".inversion:first-child li") == [
        "order/2 held exclusive:order/2 and asked for exclusive:inverted/2",
        "inverted/1 held exclusive:inverted/1 and asked for exclusive:order/1",
    ]
    assert browser.text("#inversions-count").endswith(" since the start")
    assert not browser.one("#inversions .empty").is_displayed()


async def test_the_details_of_a_resource_have_its_history(browser: Browser, tmp_path: Path) -> None:
    with running_server(admin_port=free_port(), history_dir=tmp_path) as server:
        wire = await Wire.connect(server.address)
        for note in ("first", "second"):
            await wire.release(await wire.lock("exclusive:accounts/9", transactionName=f"<{note}>"))
        held, _waits, _ = await make_queue(wire, "accounts/9", 2)
        browser.until(lambda: len(search(tmp_path / "genie", Query(resource="accounts/9")).requests) == 5)
        browser.open(server)
        browser.select(held)
        browser.click("#details .list .name")
        browser.until(lambda: len(browser.all("#details .queue li")) == 2)
        radius = browser.until(lambda: browser.one("#details .history").value_of_css_property("border-radius"))
        assert radius == "8px", "the button has the style of the page"
        browser.click("#details .history")
        browser.until(lambda: len(browser.all("#details .gantt g")) == 5)
        assert browser.texts("#details .gantt text")[:3] == ["<first>", "<second>", "accounts/9-0"]
        assert len(browser.all("#details .gantt .exclusive")) == 3
        assert len(browser.all("#details .gantt .wait")) == 2


async def test_a_click_on_a_node_shows_the_details_of_its_request(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    held, waits, _ = await make_queue(wire, "accounts/2", 2)
    browser.open(server)
    browser.select(waits)
    details = browser.text("#details")
    for part in (
        f"Id{waits}",
        "Transactionaccounts/2-1",
        "Requestsexclusive accounts/2",
        "accounts/2-0 holds exclusive",
    ):
        assert part in details
    assert browser.texts("#details .waiters li") == ["accounts/2-2"]
    browser.until_text("#details", "Times out in9 min")
    browser.one(f'.node[data-id="{held}"]').send_keys(Keys.ENTER)
    browser.until_shown(held)
    assert "Holdsexclusive accounts/2" in browser.text("#details")
    browser.click("#details .list .name")
    browser.until(lambda: len(browser.all("#details .queue li")) == 2)
    assert [text.partition(" ")[0] for text in browser.texts("#details .holders li")] == ["accounts/2-0"]
    browser.press(Keys.ESCAPE)
    browser.until(lambda: not browser.one("#details").is_displayed())


async def test_details_of_an_ended_request(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    held, waits = await make_queue(wire, "a", 1)
    browser.open(server)
    browser.select(waits)
    browser.until_text("#details .badge", "waits")
    await wire.release(waits)
    browser.until_text("#details .badge", "has ended")
    assert not browser.all("#details .danger")
    browser.click("#details .close")
    assert not browser.all(f'.node[data-id="{held}"]')


# -- actions ---------------------------------------------------------------------------------------------


async def test_a_release_asks_for_confirmation_and_shows_its_result(server: Genie, browser: Browser) -> None:
    holder, other = await Wire.connect(server.address), await Wire.connect(server.address)
    held = await holder.lock("exclusive:accounts/2", transactionName="transfer-42", **LONG)
    waits = await other.request("exclusive:accounts/2", **LONG)
    browser.open(server)
    browser.select(held)
    for cancel in (lambda: browser.click("#release .buttons button"), lambda: browser.press(Keys.ESCAPE)):
        browser.click("#details .danger")
        dialog = browser.text("#release")
        for part in (str(held), "transfer-42", "exclusive:accounts/2", "only notified that the lock was released"):
            assert part in dialog
        assert browser.chrome.switch_to.active_element.text == "Keep it"
        cancel()
        browser.until(lambda: not browser.one("#release").is_displayed())
    assert [node["id"] for node in ask(server, "api/waits")["nodes"]] == [waits, held]
    browser.click("#details .danger")
    browser.click("#release .confirm")
    browser.until_text("#release .result", "Released")
    assert await holder.expect("released") == {"id": held, "reason": "success"}
    assert (await other.expect("locked"))["id"] == waits
    browser.click("#release .buttons button")
    browser.until(lambda: not browser.nodes())


async def test_a_release_that_fails_shows_why(killable: Genie, browser: Browser) -> None:
    wire = await Wire.connect(killable.address)
    _, waits = await make_queue(wire, "a", 1)
    browser.open(killable)
    browser.select(waits)
    browser.click("#details .danger")
    killable.kill()
    browser.click("#release .confirm")
    browser.until_text("#release .result", "The outcome is unknown")
    killable.start()
    browser.until_text("#status", "Live")
    browser.click("#release .confirm")
    browser.until_text("#release .result", f"there is no request {waits}")


# -- hostile or many names -----------------------------------------------------------------------------------------


async def test_names_are_never_markup(server: Genie, browser: Browser) -> None:
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
    browser.until(lambda: HOSTILE in browser.text("#queues"))
    browser.until(lambda: HOSTILE in browser.text("#hot"))
    browser.until(lambda: browser.nodes() == {node["id"] for node in ask(server, "api/waits")["nodes"]})
    for id_ in browser.nodes():
        browser.select(id_)
    browser.until_text("#details dl", "1")
    browser.click("#details .danger")
    assert HOSTILE in browser.text("#release")
    assert len(browser.all("img")) == 1
    assert len(browser.all("script")) == 1
    assert "</text><script>alert(1)</script>\u2039202E\u203aback" in browser.text("#graph")
    assert browser.chrome.title == "genie · Genie"
    assert browser.console_messages() == []


async def test_only_its_own_server_is_requested(server: Genie, browser: Browser) -> None:
    _, waits = await make_queue(await Wire.connect(server.address), "a", 1)
    browser.open(server)
    browser.select(waits)
    requested: set[str] = set()

    def resource_requested() -> bool:
        requested.update(browser.requested_urls())
        return address(server) + "api/resources/a" in requested

    browser.until(resource_requested)
    assert {url for url in requested if not url.startswith(address(server))} == set()
    assert browser.console_messages() == []


async def test_a_large_graph_is_drawn_partially(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    for batch in range(100):
        names = [f"exclusive:big/{batch}/{n}" for n in range(100)]
        await wire.lock(*names, transactionName=f"batch-{batch}" * 20, **LONG)
    for n in range(300):
        await wire.request(f"exclusive:big/{n % 40 if n < 200 else 99}/0", transactionName=f"waiter-{n}", **LONG)
    browser.open(server)
    browser.until(lambda: (figure(browser, "locks"), figure(browser, "waiting")) == ("10,000", "300"))
    browser.until_text("#graph-count", "300 requests wait")  # the responses are not one snapshot
    nodes, links = browser.all("#graph .node"), browser.links()
    assert 20 <= len(nodes) <= 60
    assert len(links) <= 200
    drawn = sum(int(each.split()[0]) for each in browser.texts("#graph .collapsed .name"))
    drawn += len(browser.all("#graph .node.queued:not(.collapsed)"))
    assert browser.text("#graph-count") == f"300 requests wait; {300 - drawn} of them not drawn"
    assert len(browser.all("#queues tbody tr")) == 20
    browser.click('#queues tr[data-resource="big/99/0"] .name')
    browser.until(lambda: len(browser.all("#details .queue li")) == 20)
    assert "and 80 more" in browser.text("#details")
    assert browser.console_messages() == []


async def test_similar_requests_are_collapsed(server: Genie, browser: Browser) -> None:
    ids = await make_queue(await Wire.connect(server.address), "a", 20)
    browser.open(server)
    browser.until(lambda: browser.texts("#graph .collapsed .name") == ["16 more wait"])
    assert browser.nodes() == set(ids[:5])
    assert browser.text("#graph-count") == "20 requests wait"
    browser.click("#graph .collapsed")
    browser.until(lambda: len(browser.all("#details .queue li")) == 20)


# -- errors ------------------------------------------------------------------------------------


async def test_an_unreachable_server_is_reported_and_retried(killable: Genie, browser: Browser) -> None:
    browser.open(killable)
    browser.until_text("#status", "Live")
    killable.kill()
    browser.until_text("#notice", "The server is unreachable")
    assert "Retrying" in browser.text("#status")
    killable.start()
    browser.until_text("#status", "Live")
    assert not browser.one("#notice").is_displayed()


async def test_a_follower_names_the_leader(browser: Browser) -> None:
    with (
        running_redis() as redis,
        running_server(redis, admin_port=free_port(), lease=600) as leader,
        running_server(redis, admin_port=free_port(), lease=600) as follower,
    ):
        browser.open(follower)
        browser.until_text("#notice", f"follows 127.0.0.1:{leader.port}, the leader")
        assert not browser.one("#main").is_displayed()


async def test_a_token_is_requested_stored_and_sent(server: Genie, browser: Browser) -> None:
    async with token_proxy(server) as url:
        await asyncio.to_thread(_sign_in, browser, url)


def _sign_in(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.until(lambda: browser.one("#sign-in").is_displayed())
    browser.until(lambda: browser.chrome.switch_to.active_element.get_attribute("id") == "token")
    browser.enter("wrong")
    browser.until_text("#sign-in-reason", "unknown token")
    browser.enter("right")
    browser.until_text("#status", "Live")
    assert not browser.one("#sign-in").is_displayed()
    browser.chrome.refresh()
    browser.until_text("#status", "Live")
    browser.chrome.execute_script("sessionStorage.setItem('genie-token', 'limited')")
    browser.until_text("#notice", "lacks the permission inspect")


class token_proxy:  # noqa: N801 - a context manager
    """A proxy of a server's admin port that requires tokens."""

    def __init__(self, server: Genie) -> None:
        self.upstream = address(server)

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
        authorization = request.headers.get("Authorization")
        if authorization == "Bearer limited":
            return web.json_response(
                {"code": "unauthorized", "message": "limited lacks the permission inspect"}, status=403
            )
        if authorization != "Bearer right":
            return web.json_response({"code": "unauthorized", "message": "unknown token"}, status=401)
        async with self.session.get(self.upstream + request.path_qs.lstrip("/")) as answer:
            return web.json_response(await answer.json())


# -- files ------------------------------------------------------------------------------------------------


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
def test_files_have_content_types_and_security_headers(server: Genie, path: str, kind: str) -> None:
    status, headers, body = fetch(address(server) + path)
    assert status == 200
    assert headers["Content-Type"] == f"{kind}; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert body
    assert fetch(address(server) + path, **{"If-None-Match": headers["ETag"]})[0] == 304
    assert b"style=" not in body
    assert b"innerHTML" not in body


INVISIBLE = "\u202e\u2066\u2028\u200b\u00ad\u3000\U000e0041\u3164\u2800\ufe0f"
"""Characters that the protocol allows in names, and that a reader does not see, or that change the order of the others."""
SHOWN = """return [document.title, document.body.innerText, document.body.textContent,
    ...Array.from(document.querySelectorAll("[title], [aria-label]"), (each) =>
        `${each.getAttribute("title")} ${each.getAttribute("aria-label")}`)].join(" ")"""
ESCAPED = """const done = arguments[arguments.length - 1];
    import("./format.js").then(({ escapeInvisible }) => done(Array.from(arguments[0], escapeInvisible)));"""


async def test_what_the_page_shows_has_no_invisible_characters(server: Genie, browser: Browser) -> None:
    wire, other = await Wire.connect(server.address), await Wire.connect(server.address)
    names = {"note": f"note{INVISIBLE}", **LONG}
    await wire.lock(f"exclusive:one{INVISIBLE}", transactionName=f"t1{INVISIBLE}", **names)
    await other.lock(f"exclusive:two{INVISIBLE}", transactionName=f"t2{INVISIBLE}", **names)
    waits = await other.request(f"exclusive:one{INVISIBLE}", transactionName=f"t2{INVISIBLE}", **names)
    await wire.request(
        f"exclusive:two{INVISIBLE}", transactionName=f"t1{INVISIBLE}", **names
    )  # a deadlock, which ends it
    browser.open(server)
    browser.select(waits)
    browser.until_text("#details dl", "note\u2039202E\u203a")
    browser.one(".ring")
    browser.click("#details .danger")
    browser.until_text("#release", "one\u2039202E\u203a")
    shown = browser.chrome.execute_script(SHOWN)
    assert shown.count("\u20392066\u203a") > 10
    assert not [char for char in INVISIBLE if char in shown]


def test_the_page_escapes_what_a_terminal_does_not_print(server: Genie, browser: Browser) -> None:
    browser.open(server)
    characters = [*map(chr, (0x1B, 0x9B, 0x85, 0x0A, 0x7F, 0x00, 0xA0, 0xE000)), *INVISIBLE, *"a \u00e9\u53e3-"]
    escaped = browser.chrome.execute_async_script(ESCAPED, characters)
    assert [shown == char for char, shown in zip(characters, escaped, strict=True)] == [*map(is_printable, characters)]


# -- held locks and the search ------------------------------------------------------------------------------


async def test_held_locks_are_listed_and_found_by_resource_transaction_and_note(
    server: Genie, browser: Browser
) -> None:
    wire = await Wire.connect(server.address)
    first = await wire.lock("exclusive:accounts/2", "shared:rates", transactionName="transfer-42", **LONG)
    second = await wire.lock("exclusive:jobs/nightly", note="cron@host-7", **LONG)
    waits = await wire.request("exclusive:accounts/2", transactionName="report-9", **LONG)
    browser.open(server)

    def shown() -> list[str | None]:
        return [row.get_attribute("data-id") for row in browser.all("#requests tbody tr")]

    browser.until(lambda: shown() == [str(first), str(second)])
    assert browser.text("#requests-count") == "2 requests, the oldest first"
    assert browser.text("#requests-card h2") == "Held locks"
    search = browser.one("#search")
    for text, ids in (
        ("ACCOUNTS/", [first, waits]),
        ("transfer", [first]),
        ("cron", [second]),
        ("report", [waits]),
        ("nothing", []),
    ):
        search.clear()
        search.send_keys(text)
        browser.until(lambda ids=ids: shown() == [str(id) for id in ids])
        assert browser.text("#requests-card h2") == "Held locks and waiting requests"
    search.clear()
    search.send_keys("cron")
    browser.click("#requests .release")
    browser.click("#release .confirm")
    browser.until_text("#release .result", "Released")


async def test_without_a_store_and_a_history_the_page_does_not_mention_them(server: Genie, browser: Browser) -> None:
    wire = await Wire.connect(server.address)
    await make_queue(wire, "a", 1)
    browser.open(server)
    browser.until(lambda: browser.text('[data-figure="lag"] .quiet') == "of the event loop")
    browser.click("#queues .name")
    browser.until_text("#details", "Held by 1")
    assert "Who held it before?" not in browser.text("#details")


async def test_the_sparklines_are_kept_over_a_reload(server: Genie, browser: Browser) -> None:
    browser.open(server)

    def points() -> int:
        path = browser.one('[data-figure="locks"] .stroke').get_attribute("d")
        return len(path.split("L")) if path else 0

    browser.until(lambda: points() >= 3)
    before = points()
    browser.chrome.refresh()
    assert browser.until(points) >= before
