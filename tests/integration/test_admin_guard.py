"""The guard of the admin port: before paths of the tests' own, and before those of a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from admin_client import fetch
from genie.access import AccessControl, Credential, Principal
from genie.admin.security import HEADERS, PRINCIPAL, RequestGuard
from ports import free_port
from servers import running_server
from wire import Wire

LOOK, LOCK, OPS, PART = "token-of-who-looks", "token-of-who-locks", "token-of-the-ops", "token-of-a-part"
ENTRIES = [
    Credential(Principal("look", None, frozenset({"inspect"})), LOOK),
    Credential(Principal("lock", None, frozenset({"lock"})), LOCK),
    Credential(Principal("ops", ("ops/",), frozenset({"admin"})), OPS),
    Credential(Principal("part", ("accounts/",)), PART),
]
POST = {"X-Genie": "1", "Content-Type": "application/json"}
Client = TestClient[web.Request, web.Application]


async def answer(_: web.Request) -> web.Response:
    principal = PRINCIPAL.get()
    return web.Response(text="nobody" if principal is None else principal.name)


async def start(access: AccessControl, host: str = "127.0.0.1", certificate: str | None = None) -> Client:
    app = web.Application()
    RequestGuard(lambda: access, host, lambda _: certificate).install(app)
    for path in ("/", "/livez", "/readyz", "/leaderz", "/api/state", "/api/resources/{name:.+}", "/metrics"):
        app.router.add_get(path, answer)
    app.router.add_post("/api/release", answer)
    client: Client = TestClient(TestServer(app))
    await client.start_server()
    return client


@pytest.fixture
async def asked() -> AsyncIterator[Client]:
    client = await start(AccessControl(ENTRIES))
    yield client
    await client.close()


@pytest.fixture
async def free() -> AsyncIterator[Client]:
    client = await start(AccessControl())
    yield client
    await client.close()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def status(client: Client, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> int:
    async with client.request(method, path, headers=headers or {}, data=b"{}" if method == "POST" else None) as told:
        for name, value in HEADERS.items():
            assert told.headers[name] == value
        if told.status in (401, 403):
            problem = await told.json()
            assert problem["code"] == "unauthorized"
            assert "token-of" not in problem["message"]
            assert (told.headers.get("WWW-Authenticate") == "Bearer") is (told.status == 401)
        return told.status


@pytest.mark.parametrize("path", ["/", "/livez", "/readyz", "/leaderz"])
async def test_what_is_open_to_all(asked: Client, path: str) -> None:
    assert await status(asked, path) == 200


@pytest.mark.parametrize("path", ["/api/state", "/api/resources/a", "/metrics", "/api", "/api/none", "/api%2fstate"])
async def test_what_is_not(asked: Client, path: str) -> None:
    for headers in ({}, bearer("a-token-of-nobody's"), {"Authorization": f"Basic {LOOK}"}, {"Authorization": LOOK}):
        assert await status(asked, path, headers) == 401
    assert await status(asked, path, bearer(LOCK)) == 403
    assert await status(asked, path, bearer(LOOK)) in (200, 404)
    assert await status(asked, path, bearer(OPS)) in (200, 404)
    assert await status(asked, path, {"Authorization": f"bearer  {LOOK}"}) in (200, 404)


async def test_who_has_prefixes_sees_numbers_only(asked: Client) -> None:
    assert await status(asked, "/api/state", bearer(PART)) == 403
    assert await status(asked, "/metrics", bearer(PART)) == 200
    assert await status(asked, "/api/state", bearer(OPS)) == 200


async def test_a_release_needs_an_admin(asked: Client) -> None:
    expected = {LOOK: 403, LOCK: 403, PART: 403, OPS: 200}
    for token, told in expected.items():
        assert await status(asked, "/api/release", bearer(token) | POST, "POST") == told
    assert await status(asked, "/api/release", POST, "POST") == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json"},
        {"X-Genie": "1", "Content-Type": "text/plain"},
        {"X-Genie": "1", "Content-Type": "application/x-www-form-urlencoded"},
        POST | {"Sec-Fetch-Site": "cross-site"},
        POST | {"Sec-Fetch-Site": "same-site"},
        POST | {"Origin": "https://evil.example"},
        POST | {"Origin": "null"},
        POST | {"Origin": "http://127.0.0.1:1"},
    ],
)
async def test_another_site_s_page_changes_nothing(asked: Client, free: Client, headers: dict[str, str]) -> None:
    assert await status(asked, "/api/release", bearer(OPS) | headers, "POST") == 403
    assert await status(free, "/api/release", headers, "POST") == 403


async def test_the_page_itself_may(free: Client) -> None:
    own = {"Origin": f"http://127.0.0.1:{free.port}", "Sec-Fetch-Site": "same-origin"}
    for headers in (POST, POST | own, POST | {"Content-Type": "application/json; charset=utf-8"}):
        assert await status(free, "/api/release", headers, "POST") == 200


@pytest.mark.parametrize("path", ["/api/state", "/metrics"])
async def test_without_tokens_the_host_must_be_this_machine(free: Client, path: str) -> None:
    for host in ("127.0.0.1", "127.0.0.1:7078", "localhost:7078", "LOCALHOST", "[::1]:7078", "127.9.9.9"):
        assert await status(free, path, {"Host": host}) == 200, host
    for host in (
        "evil.example",
        "evil.example:7078",
        "localhost.evil.example",
        "192.0.2.1",
        "127.0.0.1.evil.example",
        "[",
        "a b",
    ):
        assert await status(free, path, {"Host": host}) == 403, host
    assert await status(free, "/livez", {"Host": "evil.example"}) == 200


async def test_the_admin_host_itself_counts_and_everywhere_is_any_address() -> None:
    named, everywhere = await start(AccessControl(), "admin.example"), await start(AccessControl(), "0.0.0.0")  # noqa: S104
    assert await status(named, "/api/state", {"Host": "Admin.example:7078"}) == 200
    assert await status(named, "/api/state", {"Host": "192.0.2.1"}) == 403
    assert await status(everywhere, "/api/state", {"Host": "192.0.2.1:7078"}) == 200
    assert await status(everywhere, "/api/state", {"Host": "evil.example"}) == 403
    await named.close()
    await everywhere.close()


async def test_with_a_token_any_host_will_do(asked: Client) -> None:
    assert await status(asked, "/api/state", bearer(LOOK) | {"Host": "genie.example"}) == 200


async def test_a_certificate_is_as_good_as_a_token() -> None:
    by_name = [Credential(Principal("ops", None, frozenset({"admin"})), None), *ENTRIES[:2]]
    known = await start(AccessControl(by_name, certificates=True), certificate="ops")
    assert await status(known, "/api/release", POST, "POST") == 200
    assert await status(known, "/api/state", bearer("a-token-of-nobody's")) == 401, "a token, if given, must be right"
    assert await status(known, "/api/release", bearer(LOOK) | POST, "POST") == 403
    token = await start(AccessControl(ENTRIES, certificates=True), certificate="look")
    assert await status(token, "/api/state") == 401, "a name with a token is proved by that"
    stranger = await start(AccessControl(certificates=True), certificate="somebody")
    assert await status(stranger, "/api/state") == 200
    assert await status(stranger, "/api/release", POST, "POST") == 403, "never an admin by itself"
    nobody = await start(AccessControl(certificates=True))
    assert await status(nobody, "/api/state") == 401
    for client in (known, token, stranger, nobody):
        await client.close()


async def test_a_real_server_stands_behind_it_and_logs_who_releases(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f'[ops]\ntoken = "{OPS}"\nmay = ["admin"]\n')
    port = free_port()
    with running_server(admin_port=port, token_file=path) as server:
        assert (await fetch(port, "/livez")).status == 200
        assert (await fetch(port, "/api/state")).status == 401
        told = await fetch(port, "/api/state", headers=bearer(OPS))
        assert told.status == 200
        assert {name.lower(): value for name, value in HEADERS.items()}.items() <= told.headers.items()
        wire = await Wire.connect(server.address)
        wire.send("hello", token=OPS)
        await wire.expect("welcome")
        id_ = await wire.lock("exclusive:a")
        body = b'{"id":%d}' % id_
        released = await fetch(port, "/api/release", method="POST", body=body, headers=bearer(OPS) | POST)
        assert released.status == 200
        line = server.until("request released by operator")
        assert (line["id"], line["principal"]) == (id_, "ops")
