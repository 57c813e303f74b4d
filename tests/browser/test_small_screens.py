"""Layout on small screens: names are complete whatever the durations, and nothing is clipped on a phone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from support.admin.browser import Browser
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import Genie, running_server

LONG = {"queueTimeout": 600_000, "transactionTimeout": 600_000, "onDisconnect": "release"}
PHONE, SMALL_PHONE, TABLET, LAPTOP, DESKTOP = (
    {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    for width, height in ((390, 844), (320, 640), (800, 1100), (1280, 1000), (1900, 1400))
)
MAX_BOTTOM_PX = 28
"""Maximum pixels between the ends of a card and of its content: paddings and borders, but less than a row."""

DRAW_AT_AGE = """
const [now, done] = arguments;
import("/graph.js").then(({ Graph }) => {
  const box = document.createElement("div");
  box.id = "graph";
  box.style.width = "900px";
  document.body.replaceChildren(box);
  const since = 1_790_000_000_000;
  const node = (id, transactionName, state, resource) => ({ id, transactionName, state, since, resources: [resource], resourcesTotal: 2 });
  const nodes = [node(1, "month-end-report", "held", "shared:ledger/2026-11"), node(2, "posting-88120", "queued", "exclusive:ledger/2026-11")];
  const edges = [{ waiter: 2, blocker: 1, resource: "ledger/2026-11", mode: "shared", state: "held", since }];
  const graph = new Graph(box, document.createElement("p"), document.createElement("ul"), () => {});
  graph.show({ nodes, edges, queueTotal: 1 }, [], since + now, null);
  const texts = (kind) => [...box.querySelectorAll(`.node .${kind}`)].map((each) => each.textContent).sort();
  done({ names: texts("name"), resources: texts("resource"), times: [...new Set(texts("time"))] });
}, (error) => done(`${error}`));
"""
SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000

CLIPPED = """
const clipped = (each) => each.scrollWidth > each.clientWidth;
const found = [...document.querySelectorAll("#graph, #queues td, .ring figcaption")].filter(clipped).map((each) => each.outerHTML.slice(0, 200));
for (const node of document.querySelectorAll("#graph .node")) {
  const box = node.querySelector("rect").getBoundingClientRect();
  if (box.right > innerWidth || box.left < 0) found.push(`node ${node.dataset.id} from ${box.left} to ${box.right}`);
  for (const text of node.querySelectorAll("text")) {
    const { left, right } = text.getBoundingClientRect();
    if (left < box.left || right > box.right) found.push(`${text.textContent} from ${left} to ${right}`);
  }
}
if (document.documentElement.scrollWidth > innerWidth) found.push(`page ${document.documentElement.scrollWidth}`);
const graph = document.querySelector("#graph");
if (graph.scrollHeight > graph.clientHeight) found.push(`graph ${graph.scrollHeight} high`);
return found;
"""


BOTTOMS = """
const found = {};
for (const card of [...document.querySelectorAll(".card")].filter((each) => each.offsetHeight)) {
  const parts = [...card.querySelectorAll("*")].filter((each) => !each.childElementCount || each.tagName === "svg");
  const bottoms = parts.map((each) => each.getBoundingClientRect()).filter((box) => box.height).map((box) => box.bottom);
  found[card.id || card.dataset.figure] = card.getBoundingClientRect().bottom - Math.max(...bottoms);
}
return found;
"""
CUT_NAMES = """
const cut = (each) => each.scrollWidth > each.clientWidth;
return [...document.querySelectorAll("#queues .name, #hot .name")].filter(cut).map((each) => each.textContent);
"""
CARDS = {"graph-card", "queues-card", "requests-card", "outcomes-card", "hot-card", "deadlocks-card", "inversions-card"}
FIGURES = {"locks", "waiting", "longest", "waits", "connections", "lag"}


@pytest.fixture(scope="module")
def genie() -> Iterator[Genie]:
    with running_server(admin_port=free_port()) as server:
        yield server


@pytest.fixture
def phone(browser: Browser) -> Iterator[Browser]:
    browser.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    yield browser
    browser.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("age", [999, 59 * SECOND, 75 * SECOND, 59 * MINUTE + 59 * SECOND, 23 * HOUR + 59 * MINUTE])
def test_names_are_complete_at_any_age(genie: Genie, browser: Browser, age: int) -> None:
    browser.open(genie)
    browser.one("#graph .empty")
    drawn: dict[str, Any] = browser.chrome.execute_async_script(DRAW_AT_AGE, age)
    assert drawn["names"] == ["month-end-report", "posting-88120"]
    assert drawn["resources"] == ["ledger/2026-11 +1"] * 2
    (time,) = drawn["times"]
    assert time in ("999 ms", "59 s", "1 min", "59 min", "23 h")


async def test_a_phone_clips_neither_the_graph_nor_the_queues(genie: Genie, phone: Browser) -> None:
    wire = await Wire.connect(genie.address)
    for number in range(1, 9):  # a chain of eight transactions
        await wire.lock(f"exclusive:chain/{number}", transactionName=f"transfer-{number}", **LONG)
    for number in range(2, 9):
        await wire.request(f"exclusive:chain/{number - 1}", transactionName=f"transfer-{number}", **LONG)
    for number in range(3):
        await wire.lock("shared:catalogue", transactionName=f"a-search-with-a-long-name-{number}", **LONG)
    await wire.request("exclusive:catalogue", transactionName="catalogue-update-of-tonight", **LONG)
    phone.open(genie)
    phone.until(lambda: len(phone.nodes()) == 18)
    phone.until(lambda: phone.texts('#queues [data-resource="catalogue"] td:last-child') != [])
    assert await asyncio.to_thread(phone.chrome.execute_script, CLIPPED) == []
    assert phone.texts('#queues [data-resource="catalogue"] td:last-child') == ["a-search-with-a-long-name-0 +2"]
    names = set(phone.texts("#graph .node .name"))
    assert {"transfer-8", "catalogue-update-of-tonight"} <= names


@pytest.mark.parametrize(
    "screen", [SMALL_PHONE, PHONE, TABLET, LAPTOP, DESKTOP], ids=lambda screen: str(screen["width"])
)
async def test_cards_end_with_their_content_and_names_of_resources_are_complete(
    genie: Genie, browser: Browser, screen: dict[str, Any]
) -> None:
    names = ["stock/lamp-brass", "ledger/2026-11", "savings/a-1871"]
    wire = await Wire.connect(genie.address)
    for name in names:
        await wire.lock(f"exclusive:{name}", transactionName=f"holder-of-{name}", **LONG)
        await wire.request(f"exclusive:{name}", transactionName=f"waiter-for-{name}", **LONG)
    browser.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        browser.open(genie)
        browser.until(lambda: {*names} <= {*browser.texts("#queues .name")} & {*browser.texts("#hot .name")})
        browser.until(lambda: len(browser.nodes()) == 2 * len(names))
        bottoms = await asyncio.to_thread(browser.chrome.execute_script, BOTTOMS)
        cut = await asyncio.to_thread(browser.chrome.execute_script, CUT_NAMES)
    finally:
        browser.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert bottoms.keys() == CARDS | FIGURES
    assert {card: room for card, room in bottoms.items() if not 0 <= room <= MAX_BOTTOM_PX} == {}
    assert cut == []
