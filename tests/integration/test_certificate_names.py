"""The name in a client's certificate is its name: the file of tokens says what it may do, on the wire and by HTTP."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from support.network.certificates import Certificates
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, running_server

TOKEN = "the token of the one who watches"  # noqa: S105 - nobody's
FILE = f"""
[payments]
prefixes = ["accounts/"]

[operator]
may = ["admin"]

[watcher]
token = "{TOKEN}"
may = ["inspect"]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def guarded(made: Certificates) -> Iterator[Genie]:
    tokens = made.folder / "tokens.toml"
    tokens.write_text(FILE)
    tokens.chmod(0o600)
    files = {"tls_cert": made.server, "tls_ca": made.ca, "token_file": tokens}
    with running_server(**files, admin_port=free_port()) as genie:
        yield genie


def shown(made: Certificates, name: str) -> ssl.SSLContext:
    return made.context(made.issue(name, common_name=name))


async def connect(genie: Genie, made: Certificates, name: str) -> Wire:
    streams = await asyncio.open_connection(*genie.address, ssl=shown(made, name), server_hostname="127.0.0.1")
    Wire.made.append(Wire(*streams))
    return Wire.made[-1]


async def refused(wire: Wire, command: str, **payload: Any) -> str:
    wire.send(command, **payload)
    error = await wire.expect("error")
    assert error["code"] == "unauthorized"
    return str(error["message"])


async def test_a_name_may_do_what_its_section_says(guarded: Genie, made: Certificates) -> None:
    payments, stranger = await connect(guarded, made, "payments"), await connect(guarded, made, "stranger")
    operator = await connect(guarded, made, "operator")
    assert "accounts/" in await refused(payments, "request", resources=["exclusive:stock"])
    held = await payments.lock("exclusive:accounts/1")
    await stranger.lock("exclusive:stock")
    await refused(stranger, "release", id=held)
    assert await operator.release(held) == "success"
    assert (await payments.expect("released"))["id"] == held
    line = guarded.until("request released by operator")
    assert (line["id"], line["principal"], line["request_principal"]) == (held, "operator", "payments")


async def test_a_token_says_otherwise_than_the_certificate(guarded: Genie, made: Certificates) -> None:
    watcher = await connect(guarded, made, "payments")
    watcher.send("hello", token=TOKEN)
    await watcher.expect("welcome")
    await refused(watcher, "request", resources=["exclusive:accounts/1"])
    liar = await connect(guarded, made, "operator")
    liar.send("hello", token=TOKEN + "?")
    assert (await liar.expect("error"))["code"] == "unauthorized"
    assert await liar.receive() == ("closed", {})


@pytest.mark.parametrize(
    ("name", "path", "status"),
    [
        ("operator", "api/state", 200),
        ("stranger", "api/state", 200),
        ("payments", "api/state", 403),
        ("payments", "metrics", 200),
        (None, "api/state", 401),
        (None, "livez", 200),
    ],
)
def test_the_admin_port_goes_by_it_too(
    guarded: Genie, made: Certificates, name: str | None, path: str, status: int
) -> None:
    context = made.context() if name is None else shown(made, name)
    assert get(guarded, path, context)[0] == status


def test_only_an_admin_releases_by_http(guarded: Genie, made: Certificates) -> None:
    for name, status, code in (("stranger", 403, "unauthorized"), ("operator", 404, "unknown-id")):
        found, problem = get(guarded, "api/release", shown(made, name), b'{"id":1}')
        assert (found, problem["code"]) == (status, code)


def get(genie: Genie, path: str, context: ssl.SSLContext, body: bytes | None = None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "X-Genie": "1"}
    url = f"https://127.0.0.1:{genie.settings['admin_port']}/{path}"
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:  # noqa: S310
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
