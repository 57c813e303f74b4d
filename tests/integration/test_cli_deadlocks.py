"""`genie deadlocks`, and the HTTP client of all commands that query the admin port, at a fake admin port."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from genie.admin.models import DeadlockRow, Deadlocks, Problem, Step
from support.admin.fake_admin import FakeAdmin, fake_admin
from support.processes.commands import genie_cli
from support.processes.ports import free_port
from support.processes.programs import CLI
from support.processes.terminal import terminal, without_sequences


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    with fake_admin() as server:
        server.responses["/api/deadlocks"] = DEADLOCKS
        yield server


def row(id: int, name: str) -> DeadlockRow:
    steps = [
        Step(resource=name, waiter=id, holder=2),
        Step(resource="licences/cad", waiter=3, holder=4, units=2, of=10),
    ]
    return DeadlockRow(at=1_790_000_000_000, id=id, transaction_name="t1", cycle=["t1", "t\x1b[2"], waits=steps)


DEADLOCKS = Deadlocks(deadlocks=[row(9, "accounts/2"), row(8, "x" * 512)], total=12)


def test_the_steps_of_a_cycle(admin: FakeAdmin) -> None:
    admin.responses["/api/deadlocks"] = Deadlocks(deadlocks=DEADLOCKS.deadlocks[:1], total=12)
    shown = genie_cli("deadlocks", admin_port=str(admin.port))
    assert (shown.returncode, shown.stderr) == (0, "")
    first, *lines = shown.stdout.splitlines()
    assert first.startswith("2026-09-2")
    assert first.endswith(" ago")
    assert lines == [
        "  9 of t1 was ended: it would have created a cycle",
        "  9 of t1 waits for accounts/2",
        "    which 2 of t\\x1b[2 holds",
        "  3 of t\\x1b[2 waits for 2/10:licences/cad",
        "    which 4 of t1 holds",
        "1 of 12 since the server started are shown.",
    ]


def test_a_long_name_is_one_line_in_a_pipe_and_wrapped_on_a_terminal(admin: FakeAdmin) -> None:
    port = str(admin.port)
    assert f"  8 of t1 waits for {'x' * 512}" in genie_cli("deadlocks", admin_port=port).stdout.splitlines()
    with terminal([*CLI, "deadlocks", "--admin-port", port], os.environ, columns=80) as shown:
        assert shown.wait() == 0
    lines = without_sequences(shown.written).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("x") for line in lines if not line.strip("x ")) == 512


def test_json_prints_the_response(admin: FakeAdmin) -> None:
    response = json.loads(genie_cli("deadlocks", "--limit", "2", "--json", admin_port=str(admin.port)).stdout)
    assert (response["total"], [row["id"] for row in response["deadlocks"]]) == (12, [9, 8])
    assert admin.paths == ["/api/deadlocks?limit=2"]
    assert response["deadlocks"][0]["waits"][1] == {
        "resource": "licences/cad",
        "waiter": 3,
        "holder": 4,
        "units": 2,
        "of": 10,
    }


def test_the_namespace_of_the_option_or_the_variable(admin: FakeAdmin) -> None:
    port = str(admin.port)
    assert genie_cli("deadlocks", "--namespace", "billing", "--limit", "2", admin_port=port).returncode == 0
    assert genie_cli("deadlocks", admin_port=port, namespace="stock:1").returncode == 0
    assert admin.paths == ["/api/deadlocks?namespace=billing&limit=2", "/api/deadlocks?namespace=stock:1&limit=10"]
    wrong = genie_cli("deadlocks", "--namespace", "a b", admin_port=port)
    assert wrong.returncode == 2
    assert "it must be a string of 1 to 128 letters, digits or any of _.:-, not 'a b'" in wrong.stderr
    assert len(admin.paths) == 2


def test_omitted_steps_of_a_cycle_are_counted(admin: FakeAdmin) -> None:
    steps = [Step(resource="a", waiter=9, holder=2), Step(resource="b", waiter=3, holder=4)]
    cut = DeadlockRow(at=0, id=9, transaction_name=None, cycle=["9", "t2"], waits=steps, steps_total=3_000)
    admin.responses["/api/deadlocks"] = Deadlocks(deadlocks=[cut], total=1)
    lines = genie_cli("deadlocks", "--admin-port", str(admin.port)).stdout.splitlines()
    assert lines[1:] == [
        "  9 was ended: it would have created a cycle",
        *["  9 waits for a", "    which 2 of t2 holds", "  3 of t2 waits for b", "    which 4 holds"],
        "  and 2,998 more steps",
    ]


def test_no_deadlocks(admin: FakeAdmin) -> None:
    admin.responses["/api/deadlocks"] = Deadlocks(deadlocks=[], total=0)
    shown = genie_cli("deadlocks", "--admin-port", str(admin.port))
    assert (shown.returncode, shown.stdout) == (0, "No deadlocks since the server started.\n")


# -- the client of all commands that query the admin port -----------------------------------------------------------------------


def test_the_token_of_the_environment_is_sent(admin: FakeAdmin, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    for variables in ({"token": "plain"}, {"token_file": str(file)}, {}):
        assert genie_cli("deadlocks", admin_port=str(admin.port), **variables).returncode == 0
    sent = [headers.get("Authorization") for headers in admin.headers]
    assert sent == ["Bearer plain", "Bearer of-the-file", None]
    file.write_text("two words\n")
    said = genie_cli("deadlocks", admin_port=str(admin.port), token_file=str(file))
    assert (said.returncode, said.stderr) == (
        2,
        f"genie: GENIE_TOKEN_FILE: {file} must contain one word, the token, not 2\n",
    )
    both = genie_cli("deadlocks", admin_port=str(admin.port), token_file=str(file), token="plain")
    assert both.returncode == 0, "GENIE_TOKEN takes precedence, as for all clients"
    assert admin.headers[-1].get("Authorization") == "Bearer plain"
    broken = genie_cli("deadlocks", admin_port=str(admin.port), token="a\r\nb")
    assert broken.stderr == (
        "genie: the token of GENIE_TOKEN or GENIE_TOKEN_FILE must not contain control characters\n"
    )
    assert len(admin.headers) == 4


def test_error_responses_are_printed_in_one_line(admin: FakeAdmin) -> None:
    def error_of(**variables: str) -> str:
        done = genie_cli("deadlocks", admin_port=str(admin.port), **variables)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr

    admin.responses["/api/deadlocks"] = Problem(code="unavailable", message="this server follows", leader="other:7077")
    assert error_of() == "genie: unavailable: this server follows (other:7077 leads: query its admin port)\n"
    admin.status = 401
    admin.responses["/api/deadlocks"] = Problem(code="unauthorized", message="say\x1b[2J the token")
    assert (
        error_of()
        == "genie: unauthorized: say\\x1b[2J the token (no token was sent: GENIE_TOKEN and GENIE_TOKEN_FILE are not set)\n"
    )
    sent = "(the token sent is that of GENIE_TOKEN)"
    assert error_of(token="wrong") == f"genie: unauthorized: say\\x1b[2J the token {sent}\n"
    admin.responses["/api/deadlocks"] = b"<html>"
    expected = f"genie: 127.0.0.1:{admin.port} responded 401, but not in the format of the admin port of this version\n"
    assert error_of() == expected
    admin.status = 200
    admin.responses["/api/deadlocks"] = b'{"deadlocks":7,"total":1}'
    assert error_of().startswith("genie: unexpected reply, the server may have another version: ")


def test_an_unreachable_or_invalid_admin_port() -> None:
    port = str(free_port())
    assert genie_cli("deadlocks", admin_port=port).stderr.startswith(
        f"genie: cannot connect to the admin port 127.0.0.1:{port}: "
    )
    none = genie_cli("deadlocks", admin_port="")
    assert (none.returncode, none.stderr) == (2, "genie: no admin port: GENIE_ADMIN_PORT is empty\n")
    for wrong in ("0", "70000", "http"):
        said = genie_cli("deadlocks", "--admin-port", wrong).stderr
        assert said.startswith("genie: --admin-port: ")
        assert f"a port is a number from 1 to 65535, not {wrong!r}" in said
    for wrong in ("https://", "http://host/path", "user@host"):
        said = genie_cli("deadlocks", "--admin-host", wrong).stderr
        assert said == f"genie: --admin-host: must be a host name or an address, also as https://HOST, not {wrong!r}\n"


def test_https_verifies_the_certificate(tmp_path: Path) -> None:
    ca, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with fake_admin(ssl_context=context) as admin:
        admin.responses["/api/deadlocks"] = DEADLOCKS
        trusted = {"admin_port": str(admin.port), "tls_ca": str(tmp_path / "ca.pem")}
        trusted_reply = genie_cli("deadlocks", "--admin-host", "https://127.0.0.1", **trusted)
        untrusted = genie_cli("deadlocks", admin_host=f"https://127.0.0.1:{admin.port}/")
        plain = genie_cli("deadlocks", **trusted)
        missing = genie_cli("deadlocks", admin_host="https://127.0.0.1", tls_ca=str(tmp_path / "none.pem"))
    assert (trusted_reply.returncode, trusted_reply.stderr) == (0, "")
    assert f"127.0.0.1:{admin.port} has an untrusted certificate" in untrusted.stderr
    assert f"if it has a certificate, use https://127.0.0.1:{admin.port}\n" in plain.stderr
    assert missing.stderr.startswith(f"genie: GENIE_TLS_CA: {tmp_path / 'none.pem'} can't be read: ")


def test_https_with_a_client_certificate(tmp_path: Path) -> None:
    ca, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    own = ca.issue_cert("operator")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    own.cert_chain_pems[0].write_to_path(str(tmp_path / "own.pem"))
    own.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    with fake_admin(ssl_context=context) as admin:
        admin.responses["/api/deadlocks"] = DEADLOCKS
        variables = {"admin_host": f"https://127.0.0.1:{admin.port}", "tls_ca": str(tmp_path / "ca.pem")}
        shown = {"tls_cert": str(tmp_path / "own.pem"), "tls_key": str(tmp_path / "key.pem")}
        trusted_reply = genie_cli("deadlocks", **variables, **shown)
        none = genie_cli("deadlocks", **variables)
        keyless = genie_cli("deadlocks", **variables, tls_cert=str(tmp_path / "own.pem"))
    assert (trusted_reply.returncode, trusted_reply.stderr) == (0, "")
    assert none.returncode == 1
    assert none.stderr.startswith(f"genie: 127.0.0.1:{admin.port} did not respond in HTTP: ")
    assert keyless.stderr.startswith(f"genie: GENIE_TLS_CERT: there is no private key in {tmp_path / 'own.pem'}")
