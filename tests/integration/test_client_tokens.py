"""Clients with a token: asyncio, threads and the command line."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path

import pytest

import genie
import genie.sync
from genie.client import config
from support.processes.commands import genie_cli
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, running_server

TOKEN, OTHER = "a-token-of-the-tests", "another-token-of-the-tests"
WRONG = "an-unknown-token-value"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GENIE_TOKEN", "GENIE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def toml_sections(**tokens: str) -> str:
    return "".join(f'[{name}]\ntoken = "{token}"\n' for name, token in tokens.items())


def write_token_file(folder: Path, text: str) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    return path


async def test_a_valid_and_an_invalid_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(token=TOKEN) as server:
        async with genie.connect(*server.address, token=TOKEN) as client:
            await (await client.acquire("a")).release()
        for token in (None, "", WRONG):
            with pytest.raises(genie.RequestRejected, match="unauthorized") as caught:
                async with genie.connect(*server.address, token=token, connect_timeout=WAIT_S):
                    pass
            assert caught.value.code == "unauthorized"
            assert WRONG not in str(caught.value)
        monkeypatch.setenv("GENIE_TOKEN_FILE", str(write_token_file(tmp_path, TOKEN + "\n")))
        async with genie.connect(*server.address) as client:
            await client.ping()
            assert TOKEN not in repr(client)
        monkeypatch.setenv("GENIE_TOKEN", WRONG)
        with pytest.raises(genie.RequestRejected):
            async with genie.connect(*server.address):
                pass


def test_threads_a_valid_and_an_invalid_token() -> None:
    with running_server(token=TOKEN) as server:
        with genie.sync.connect(*server.address, token=TOKEN) as client:
            client.acquire("a").release()
            assert TOKEN not in repr(client)
        with (
            pytest.raises(genie.RequestRejected, match="unauthorized") as caught,
            genie.sync.connect(*server.address, token=WRONG),
        ):
            pass
        assert WRONG not in str(caught.value)


def test_the_sources_of_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.resolve_token() is None
    path = write_token_file(tmp_path, f" {TOKEN}\n")
    monkeypatch.setenv("GENIE_TOKEN_FILE", str(path))
    assert config.resolve_token() == TOKEN
    assert config.resolve_token("") is None
    path.write_text(toml_sections(payments=TOKEN))
    with pytest.raises(ValueError, match=f"^GENIE_TOKEN_FILE: {path} must contain one word, the token, not 4$"):
        config.resolve_token()  # that is a server's
    assert config.resolve_token("") is None
    assert config.resolve_token(OTHER) == OTHER
    monkeypatch.setenv("GENIE_TOKEN", OTHER)
    assert config.resolve_token() == OTHER
    assert config.resolve_token(TOKEN) == TOKEN
    monkeypatch.setenv("GENIE_TOKEN", "")
    path.unlink()
    with pytest.raises(ValueError, match=r"GENIE_TOKEN_FILE: .* can't be read: No such file"):
        config.resolve_token()


def test_the_error_of_an_invalid_token_does_not_contain_it() -> None:
    with pytest.raises(ValueError, match="token must be a string of 1 to 1024 characters") as caught:
        genie.connect(token="t" * 1025)
    assert "ttt" not in str(caught.value)


def revoke(server: Genie, path: Path, text: str) -> None:
    path.write_text(text)
    server.send(signal.SIGHUP)
    server.until("access tokens reloaded")


async def test_waiting_calls_fail_when_the_token_is_revoked(tmp_path: Path) -> None:
    path = write_token_file(tmp_path, toml_sections(a=TOKEN, b=OTHER))
    with running_server(token_file=path) as server:
        async with genie.connect(*server.address, token=OTHER) as holder:
            await holder.acquire("a")
            async with genie.connect(*server.address, token=TOKEN) as client:
                waiting = asyncio.create_task(client.acquire("a", queue_timeout=600))
                while (await holder.inspect()).queue_total == 0:  # noqa: ASYNC110 - the server says when
                    await asyncio.sleep(0)
                revoke(server, path, toml_sections(b=OTHER))
                with pytest.raises(genie.RequestRejected, match="unauthorized"):
                    await waiting
                for call in (client.acquire("b"), client.ping()):
                    with pytest.raises(genie.RequestRejected, match="unauthorized"):
                        await call
                revoke(server, path, toml_sections(a=TOKEN, b=OTHER))
                while True:
                    try:
                        await client.ping()
                        break
                    except genie.RequestRejected:
                        await asyncio.sleep(0.01)
                await client.acquire("b")


def test_threads_waiting_calls_fail_when_the_token_is_revoked(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    path = write_token_file(tmp_path, toml_sections(a=TOKEN, b=OTHER))
    with (
        running_server(token_file=path) as server,
        ThreadPoolExecutor(1) as pool,
        genie.sync.connect(*server.address, token=OTHER) as holder,
        genie.sync.connect(*server.address, token=TOKEN) as client,
    ):
        holder.acquire("a")
        waiting = pool.submit(client.acquire, "a", queue_timeout=600)
        while holder.inspect().queue_total == 0:
            pass
        revoke(server, path, toml_sections(b=OTHER))
        with pytest.raises(genie.RequestRejected, match="unauthorized"):
            waiting.result(WAIT_S)
        with pytest.raises(genie.RequestRejected, match="unauthorized"):
            client.ping()


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("inspect",),
        ("waits",),
        ("run", "a", "--", "true"),
        ("bench", "own", "--connections", "2", "--seconds", "1", "--warm-up", "0"),
    ],
    ids=lambda words: words[0],
)
def test_commands_use_the_variables(words: tuple[str, ...], tmp_path: Path) -> None:
    with running_server(token=TOKEN) as server:
        assert genie_cli(*words, port=server.port, token=TOKEN).returncode == 0
        assert genie_cli(*words, port=server.port, token_file=str(write_token_file(tmp_path, TOKEN))).returncode == 0
        done = genie_cli(*words, port=server.port, token=WRONG)
        assert done.returncode != 0
        assert "unauthorized: the token of hello is not known (the token sent is that of GENIE_TOKEN)" in done.stderr
        assert WRONG not in done.stderr
        path = str(write_token_file(tmp_path, WRONG))
        done = genie_cli(*words, port=server.port, token_file=path)
        assert f"is not known (the token sent is that of GENIE_TOKEN_FILE, {path})" in done.stderr
        done = genie_cli(*words, port=server.port)
        assert done.returncode != 0
        assert "unauthorized: hello carried no token" in done.stderr
        assert "(no token was sent: GENIE_TOKEN and GENIE_TOKEN_FILE are not set)" in done.stderr


@pytest.mark.parametrize("words", [("top", "--once"), ("deadlocks",)], ids=lambda words: words[0])
def test_the_admin_port_distinguishes_a_wrong_and_a_missing_token(words: tuple[str, ...]) -> None:
    with running_server(token=TOKEN, admin_port=free_port()) as server:
        port = server.settings["admin_port"]
        missing, wrong = genie_cli(*words, admin_port=port), genie_cli(*words, admin_port=port, token=WRONG)
        assert genie_cli(*words, admin_port=port, token=TOKEN).returncode == 0
        reasons = [server.until("admin authentication failed")["reason"] for _ in range(2)]
    assert reasons == ["no token", "unknown token"]
    assert "missing token" in missing.stderr
    assert "(no token was sent: GENIE_TOKEN and GENIE_TOKEN_FILE are not set)" in missing.stderr
    assert "unknown token" in wrong.stderr
    assert "(the token sent is that of GENIE_TOKEN)" in wrong.stderr


def test_a_principal_with_inspect_can_use_the_read_only_commands(tmp_path: Path) -> None:
    path = write_token_file(tmp_path, toml_sections(a=TOKEN) + 'may = ["inspect"]\n')
    with running_server(token_file=path) as server:
        for words in (("status",), ("inspect",)):
            done = genie_cli(*words, port=server.port, token=TOKEN)
            assert done.returncode == 0, done.stderr
        done = genie_cli("run", "a", "--", "true", port=server.port, token=TOKEN)
        assert "requires the permission 'lock'" in done.stderr


@pytest.mark.parametrize("limits", ['may = ["lock"]', 'prefixes = ["accounts/"]'])
def test_the_health_check_of_a_restricted_principal(tmp_path: Path, limits: str) -> None:
    path = write_token_file(tmp_path, f'[a]\ntoken = "{TOKEN}"\n{limits}\n')
    with running_server(token_file=path) as server:
        shown = genie_cli("status", port=server.port, token=TOKEN)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert re.fullmatch(r"127\.0\.0\.1:\d+ leads, and responded in [\d.]+ ms\ngenie/.+\n", shown.stdout)
        told = json.loads(genie_cli("status", "--json", port=server.port, token=TOKEN).stdout)
        assert (told["held"], told["waiting"]) == (None, None)
        wrong = genie_cli("status", port=server.port, token=WRONG)
        assert wrong.returncode == 1
        assert "unauthorized" in wrong.stderr
