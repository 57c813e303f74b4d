"""The request guard of the admin port: with handlers of this test, and in a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from genie.access import AccessControl, Credential, Principal
from genie.admin.security import HEADERS, PRINCIPAL, RequestGuard
from support.admin.client import fetch
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import running_server

INSPECT, LOCK, OPS, LIMITED = "token-of-inspect", "token-of-locks", "token-of-the-ops", "token-of-limited"
ENTRIES = [
    Credential(Principal("inspect", None, frozenset({"inspect"})), INSPECT),
    Credential(Principal("lock", None, frozenset({"lock"})), LOCK),
    Credential(Principal("ops", ("ops/",), frozenset({"admin"})), OPS),
    Credential(Principal("limited", ("accounts/",)), LIMITED),
]
POST = {"X-Genie": "1", "Content-Type": "application/json"}
Client = TestClient[web.Request, web.Application]


async def respond(_: web.Request) -> web.Response:
    principal = PRINCIPAL.get()
    return web.Response(text="none" if principal is None else principal.name)


async def start(access: AccessControl, host: str = "127.0.0.1", certificate: str | None = None) -> Client:
    app = web.Application()
    RequestGuard(lambda: access, host, lambda _: certificate).install(app)
    for path in ("/", "/livez", "/readyz", "/leaderz", "/api/state", "/api/resources/{name:.+}", "/metrics"):
        app.router.add_get(path, respond)
    app.router.add_post("/api/release", respond)
    client: Client = TestClient(TestServer(app))
    await client.start_server()
    return client


@pytest.fixture
async def guarded() -> AsyncIterator[Client]:
    client = await start(AccessControl(ENTRIES))
    yield client
    await client.close()


@pytest.fixture
async def unauthenticated() -> AsyncIterator[Client]:
    client = await start(AccessControl())
    yield client
    await client.close()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def status(client: Client, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> int:
    async with client.request(
        method, path, headers=headers or {}, data=b"{}" if method == "POST" else None
    ) as response:
        for name, value in HEADERS.items():
            assert response.headers[name] == value
        if response.status in (401, 403):
            problem = await response.json()
            assert problem["code"] == "unauthorized"
            assert "token-of" not in problem["message"]
            assert (response.headers.get("WWW-Authenticate") == "Bearer") is (response.status == 401)
        return response.status


@pytest.mark.parametrize("path", ["/", "/livez", "/readyz", "/leaderz"])
async def test_the_page_and_health_checks_are_public(guarded: Client, path: str) -> None:
    assert await status(guarded, path) == 200


@pytest.mark.parametrize("path", ["/api/state", "/api/resources/a", "/metrics", "/api", "/api/none", "/api%2fstate"])
async def test_api_and_metrics_require_a_token_with_permission(guarded: Client, path: str) -> None:
    for headers in ({}, bearer("an-unknown-token"), {"Authorization": f"Basic {INSPECT}"}, {"Authorization": INSPECT}):
        assert await status(guarded, path, headers) == 401
    assert await status(guarded, path, bearer(LOCK)) == 403
    assert await status(guarded, path, bearer(INSPECT)) in (200, 404)
    assert await status(guarded, path, bearer(OPS)) in (200, 404)
    assert await status(guarded, path, {"Authorization": f"bearer  {INSPECT}"}) in (200, 404)


async def test_a_principal_with_prefixes_may_only_read_metrics(guarded: Client) -> None:
    assert await status(guarded, "/api/state", bearer(LIMITED)) == 403
    assert await status(guarded, "/metrics", bearer(LIMITED)) == 200
    assert await status(guarded, "/api/state", bearer(OPS)) == 200


async def test_a_release_requires_the_permission_admin(guarded: Client) -> None:
    expected = {INSPECT: 403, LOCK: 403, LIMITED: 403, OPS: 200}
    for token, expected_status in expected.items():
        assert await status(guarded, "/api/release", bearer(token) | POST, "POST") == expected_status
    assert await status(guarded, "/api/release", POST, "POST") == 401


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
async def test_cross_site_requests_are_rejected(
    guarded: Client, unauthenticated: Client, headers: dict[str, str]
) -> None:
    assert await status(guarded, "/api/release", bearer(OPS) | headers, "POST") == 403
    assert await status(unauthenticated, "/api/release", headers, "POST") == 403


async def test_a_content_type_is_not_parsed_beyond_its_name(
    unauthenticated: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser of aiohttp needs 0.2 s for 8 KiB of parameters."""
    parsed: list[str] = []
    parse = HeaderParser.parsestr

    def recorded(self: HeaderParser, text: str, headersonly: bool = True) -> Message:
        parsed.append(text)
        return parse(self, text, headersonly)

    monkeypatch.setattr(HeaderParser, "parsestr", recorded)
    headers = POST | {"Content-Type": "Application/JSON" + ";" * 7_900}
    assert await status(unauthenticated, "/api/release", headers, "POST") == 200
    assert parsed == []


async def test_same_origin_requests_are_allowed(unauthenticated: Client) -> None:
    own = {"Origin": f"http://127.0.0.1:{unauthenticated.port}", "Sec-Fetch-Site": "same-origin"}
    for headers in (POST, POST | own, POST | {"Content-Type": "application/json; charset=utf-8"}):
        assert await status(unauthenticated, "/api/release", headers, "POST") == 200


@pytest.mark.parametrize("path", ["/api/state", "/metrics"])
async def test_without_tokens_the_host_must_be_this_machine(unauthenticated: Client, path: str) -> None:
    for host in ("127.0.0.1", "127.0.0.1:7078", "localhost:7078", "LOCALHOST", "[::1]:7078", "127.9.9.9"):
        assert await status(unauthenticated, path, {"Host": host}) == 200, host
    for host in (
        "evil.example",
        "evil.example:7078",
        "localhost.evil.example",
        "192.0.2.1",
        "127.0.0.1.evil.example",
        "[",
        "a b",
        "evil.example@127.0.0.1",
        "evil.example@localhost:7078",
        "127.0.0.1/evil.example",
        "127.0.0.1?evil.example",
        "127.0.0.1#evil.example",
        "127.0.0.1\\evil.example",
        "127.0.0.1:",
        "127.0.0.1:7078:80",
        "[::1",
        "[::1]evil.example",
        "",
    ):
        assert await status(unauthenticated, path, {"Host": host}) == 403, host
    assert await status(unauthenticated, "/livez", {"Host": "evil.example"}) == 200


async def test_the_admin_host_and_wildcard_addresses_are_trusted() -> None:
    named, wildcard = await start(AccessControl(), "admin.example"), await start(AccessControl(), "0.0.0.0")  # noqa: S104
    assert await status(named, "/api/state", {"Host": "Admin.example:7078"}) == 200
    assert await status(named, "/api/state", {"Host": "192.0.2.1"}) == 403
    assert await status(wildcard, "/api/state", {"Host": "192.0.2.1:7078"}) == 200
    assert await status(wildcard, "/api/state", {"Host": "evil.example"}) == 403
    await named.close()
    await wildcard.close()


async def test_with_a_token_any_host_is_allowed(guarded: Client) -> None:
    assert await status(guarded, "/api/state", bearer(INSPECT) | {"Host": "genie.example"}) == 200


async def test_a_client_certificate_authenticates() -> None:
    by_name = [Credential(Principal("ops", None, frozenset({"admin"})), None), *ENTRIES[:2]]
    known = await start(AccessControl(by_name, certificates_required=True), certificate="ops")
    assert await status(known, "/api/release", POST, "POST") == 200
    assert await status(known, "/api/state", bearer("an-unknown-token")) == 401, (
        "a token takes precedence and must be valid"
    )
    assert await status(known, "/api/release", bearer(INSPECT) | POST, "POST") == 403
    token = await start(AccessControl(ENTRIES, certificates_required=True), certificate="inspect")
    assert await status(token, "/api/state") == 401, "a principal with a token needs it"
    other = await start(AccessControl(certificates_required=True), certificate="other")
    assert await status(other, "/api/state") == 200
    assert await status(other, "/api/release", POST, "POST") == 403, "a certificate alone gives no admin permission"
    without = await start(AccessControl(certificates_required=True))
    assert await status(without, "/api/state") == 401
    for client in (known, token, other, without):
        await client.close()


async def test_a_real_server_checks_requests_and_logs_releases(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f'[ops]\ntoken = "{OPS}"\nmay = ["admin"]\n')
    port = free_port()
    with running_server(admin_port=port, token_file=path) as server:
        assert (await fetch(port, "/livez")).status == 200
        assert (await fetch(port, "/api/state")).status == 401
        state = await fetch(port, "/api/state", headers=bearer(OPS))
        assert state.status == 200
        assert {name.lower(): value for name, value in HEADERS.items()}.items() <= state.headers.items()
        wire = await Wire.connect(server.address)
        wire.send("hello", token=OPS)
        await wire.expect("welcome")
        id_ = await wire.lock("exclusive:a")
        body = b'{"id":%d}' % id_
        released = await fetch(port, "/api/release", method="POST", body=body, headers=bearer(OPS) | POST)
        assert released.status == 200
        line = server.until("request released by operator")
        assert (line["id"], line["principal"]) == (id_, "ops")
