"""Settings from options, variables and a file: precedence, errors, and what `genie config` shows."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from genie.cli import main
from genie.cli.configuration import ConfigurationError, read_file
from genie.cli.serve import serve
from genie.config import RELOADABLE, Settings, file_key

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(command: str, *arguments: str, file: str | None = None, **variables: str) -> Result:
    if file is not None:
        Path("genie.toml").write_text(file)
        arguments = ("--config", "genie.toml", *arguments)
    environment = {f"GENIE_{name.upper()}": value for name, value in variables.items()}
    return CliRunner().invoke(main, ["config", command, *arguments], env=environment)


def shown(*arguments: str, file: str | None = None, **variables: str) -> dict[str, tuple[Any, str]]:
    result = config("show", "--json", *arguments, file=file, **variables)
    assert result.exit_code == 0, result.output
    return {row["key"]: (row["value"], row["source"]) for row in json.loads(result.output)["settings"]}


def test_an_option_precedes_a_variable_precedes_the_file_precedes_the_default() -> None:
    file = "port = 1\nlease = 2\nslow_wait = 3\n"
    settings = shown("--port", "7", "--max-line", "2048", file=file, port="8", lease="9")
    assert settings["port"] == (7, "--port")
    assert settings["lease"] == (9, "GENIE_LEASE")
    assert settings["slow_wait"] == (3, "slow_wait in genie.toml")
    assert settings["limits.max_line"] == (2048, "--max-line")
    assert settings["host"] == ("127.0.0.1", "default")


def test_every_setting_is_shown_and_can_be_in_the_file() -> None:
    settings = shown()
    assert set(settings) == {file_key(name) for name in Settings().options()}
    assert {source for _, source in settings.values()} == {"default"}
    lines: dict[str, list[str]] = {}
    for key, (value, _) in settings.items():
        section, _, name = key.rpartition(".")
        text = json.dumps("x" if value is None else value)
        lines.setdefault(section, []).append(f"{name} = {text}")
    document = "\n".join([*lines.pop(""), *(f"[{name}]\n" + "\n".join(rows) for name, rows in lines.items())])
    Path("genie.toml").write_text(document)
    assert set(read_file("genie.toml", serve.params)) == set(Settings().options())


def test_the_file_is_named_by_a_variable() -> None:
    Path("other.toml").write_text("port = 5\n")
    assert shown(config="other.toml")["port"] == (5, "port in other.toml")


def test_no_file_is_read_without_being_named() -> None:
    Path("genie.toml").write_text("port = 5\n")
    assert shown()["port"] == (7077, "default")


@pytest.mark.parametrize(
    ("arguments", "file", "variables", "expected"),
    [
        ([], '[redis]\nhost = "a"\nport = 1\n', {}, ("redis://a:1/0", "redis.host in genie.toml")),
        ([], '[redis]\nurl = "redis://u"\nhost = "a"\n', {}, ("redis://u", "redis.url in genie.toml")),
        (["--redis-host", "b"], '[redis]\nurl = "redis://u"\n', {}, ("redis://b:6379/0", "--redis-host")),
        ([], '[redis]\nurl = "redis://u"\n', {"redis_port": "2"}, ("redis://127.0.0.1:2/0", "GENIE_REDIS_PORT")),
        (["--redis-port", "3"], "", {"redis_url": "redis://u"}, ("redis://127.0.0.1:3/0", "--redis-port")),
        (["--redis-url", "redis://v"], '[redis]\nhost = "a"\n', {}, ("redis://v", "--redis-url")),
    ],
)
def test_the_redis_of_the_preceding_source_is_used(
    arguments: list[str], file: str, variables: dict[str, str], expected: tuple[str, str]
) -> None:
    assert shown(*arguments, file=file, **variables)["redis.url"] == expected


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("prot = 1", "prot: unknown key; did you mean port?"),
        ("[limits]\nmax_lines = 1", "limits.max_lines: unknown key; did you mean limits.max_line?"),
        ("max_line = 4096", "max_line: unknown key; did you mean limits.max_line?"),
        ('redis_url = "x"', "redis_url: unknown key; did you mean redis.url?"),
        ("slow-wait = 1", "slow-wait: unknown key; did you mean slow_wait?"),
        ("[redis]\nrul = 1", "redis.rul: unknown key; did you mean redis.url?"),
        ("zzzzzz = 1", "zzzzzz: unknown key"),
        ("[limit]\nmax_line = 1", "[limit]: unknown section; did you mean [limits]?"),
        ("[x]\ny = 1", "[x]: unknown section; the sections are [limits], [tls], [redis], [admin], [history]"),
        ("tls = true", "tls: must be a section, [tls]"),
        ('port = "7077"', "port: must be a port number, not '7077'"),
        ("port = true", "port: must be a port number, not true"),
        ("port = 70000", "port: a port is a number from 0 to 65535, not 70000"),
        ("insecure = 1", "insecure: must be true or false, not 1"),
        ("host = 1", "host: must be a string, not 1"),
        ('host = ""', "host: must not be empty; leave out the key for the default"),
        ("lease = '3'", "lease: must be a number, not '3'"),
        ("lease = 0", "lease: a number from 0.1 to 3600 is needed, not 0"),
        ("[limits]\nmax_line = 5", "limits.max_line: a whole number of at least 1024 is needed, not 5"),
        ("[limits]\nmax_line = 2048.0", "limits.max_line: must be a whole number, not 2048.0"),
        ('namespaces = "a"', "namespaces: must be an array of names, such as [\"genie\"], not 'a'"),
        ("namespaces = [1]", 'namespaces: must be an array of names, such as ["genie"], not [1]'),
        ("namespaces = []", "namespaces: must not be empty; leave out the key for the default"),
        ('namespaces = ["a", "a"]', "namespaces: namespace 'a' is listed more than once"),
        ('log_level = "loud"', "log_level: 'loud' is not one of 'debug', 'info', 'warning', 'error'"),
        ('[admin]\nport = "x"', "admin.port: must be a port number, or \"\" for no admin port, not 'x'"),
        ("token = 123456789", "token: must be a string"),
        ("[redis]\nurl = [1]", "redis.url: must be a string"),
        ("port = x", "is not TOML: Invalid value (at line 1, column 8)"),
        ("port = " + "[" * 100_000, "is not TOML: its values are nested too deeply"),
        ('host = "a\\u0000b"', "host: must not contain a null character"),
    ],
)
def test_an_error_names_the_file_the_key_and_what_is_right(file: str, error: str) -> None:
    result = config("check", file=file)
    assert result.exit_code == 2
    assert result.output == f"genie: genie.toml: {error}\n"


def test_a_number_of_thousands_of_digits_is_an_error() -> None:
    result = config("check", file="port = " + "9" * 5000)
    assert result.exit_code == 2
    assert result.output.startswith("genie: genie.toml: is not TOML: ")


def test_all_errors_are_reported() -> None:
    Path("genie.toml").write_text('a = 1\nport = "x"\n')
    with pytest.raises(ConfigurationError) as caught:
        read_file("genie.toml", serve.params)
    assert [line.split(":")[1] for line in caught.value.errors] == [" a", " port"]


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_an_error(content: bytes | None) -> None:
    if content is not None:
        Path("genie.toml").write_bytes(content)
    result = config("check", "--config", "genie.toml")
    assert (result.exit_code, result.output.split(":")[:2]) == (2, ["genie", " genie.toml"])


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ('[tls]\ncert = "none.pem"', "tls.cert in genie.toml: "),
        ('[tls]\nkey = "none.pem"', "tls.key in genie.toml is set, but GENIE_TLS_CERT"),
        ('token_file = "none"', "token_file in genie.toml: none can't be read"),
        ('token = "short"', "token in genie.toml must have 16 to 1024 characters"),
        (
            'token_file = "a"\ntoken = "0123456789abcdef"',
            "token in genie.toml and token_file in genie.toml are mutually",
        ),
        ('[redis]\nurl = "http://x"', "the Redis URL must begin with redis://"),
        ("[redis]\nfsync = true", "--redis-min-replicas and redis.fsync in genie.toml require"),
        ('host = "203.0.113.7"', "host in genie.toml=203.0.113.7 would allow unauthenticated access"),
        ('advertise = "foo"', "advertise in genie.toml: must be one HOST:PORT"),
    ],
)
def test_check_reads_what_the_settings_name(file: str, expected: str) -> None:
    result = config("check", file=file)
    assert result.exit_code == 2
    assert f"genie: {expected}" in result.output


def test_a_valid_configuration_passes_the_check() -> None:
    Path("secret").write_text("0123456789abcdef")
    result = config("check", file='token_file = "secret"\nhost = "0.0.0.0"\n[admin]\nport = ""\n')
    assert (result.exit_code, result.output) == (0, "genie.toml: valid\n")


def test_paths_are_relative_to_the_file() -> None:
    Path("etc").mkdir()
    Path("etc/genie.toml").write_text('token_file = "tokens"\n[tls]\ncert = "/a.pem"\n')
    settings = shown("--config", "etc/genie.toml")
    assert (settings["token_file"][0], settings["tls.cert"][0]) == ("etc/tokens", "/a.pem")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:sesame@a:1/2", "redis://:***@a:1/2"),
        ("redis://me:sesame@a", "redis://me:***@a"),
        ("redis+sentinel://me:sesame@a,b/m?sentinel_password=sesame&ssl_ca_certs=f",
         "redis+sentinel://me:***@a,b/m?sentinel_password=***&ssl_ca_certs=f"),
        ("redis://me:ses/ame@a", "***"),
        ("redis://me:ses@ame@a", "***"),
        ("redis://a/0", "redis://a/0"),
    ],
)  # fmt: skip
def test_secrets_are_hidden(url: str, expected: str) -> None:
    file = f'token = "open-sesame-0123"\n[redis]\nurl = "{url}"\n'
    for arguments in (("--json",), ()):
        assert "sesame" not in config("show", *arguments, file=file).output
    assert shown(file=file)["redis.url"][0] == expected
    assert shown(file=file)["token"] == ("***", "token in genie.toml")
    assert "sesame" not in config("check", file=file + "x = 1").output


def test_the_example_of_the_page_is_valid_and_its_output_is_right() -> None:
    page = PAGE.read_text()
    (example,) = re.findall(r"```toml\n(# genie.toml\n.*?)```", page, re.DOTALL)
    Path("genie.toml").write_text(example)
    read = read_file("genie.toml", serve.params)
    assert set(tomllib.loads(example)) > {"redis", "tls", "admin", "limits"}
    assert read["namespaces"] == ("orders", "wallets")
    check, show, _ = re.findall(r"```sh\n[^\n]*genie config [^\n]*\n```\n\n```text\n(.*?)```", page, re.DOTALL)
    broken = example.replace("max_connections", "max_conections").replace("0.5", '"0.5"')
    assert sorted(config("check", file=broken).output.replace("genie: ", "").splitlines()) == sorted(
        check.replace("genie: ", "").splitlines()
    )
    output = config("show", "--log-level", "debug", file=example, port="7177").output
    normal = [" ".join(line.split()) for line in output.splitlines()]
    for line in show.splitlines():
        assert line == "…" or " ".join(line.split()) in normal


def test_the_page_lists_what_can_change_at_run_time() -> None:
    text = PAGE.read_text().partition("These settings can change while the server runs:")[2]
    section = text.strip().partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert named == {file_key(name).rpartition(".")[2] for name in RELOADABLE}


def test_the_page_shows_the_limits_as_the_command_does() -> None:
    (shown,) = re.findall(r"```text\n( +setting +limit.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown == config("limits").output


def test_the_memory_at_most_is_the_sum_of_the_limits() -> None:
    result = json.loads(config("limits", "--json").output)
    assert result["bytes"] == sum(row["bytes"] for row in result["limits"])
    keys = {row["setting"] for row in result["limits"]} - {None}
    assert keys <= {file_key(name) for name in Settings().options()}


@pytest.mark.parametrize(
    ("file", "setting", "factor"),
    [
        ('namespaces = ["a", "b", "c"]', "limits.max_state", 3),
        ("[limits]\nmax_state = 8589934592", "limits.max_state", 2),
        ("[limits]\nmax_connections = 2000", "limits.max_connections", 0.1),
    ],
)
def test_the_memory_at_most_follows_from_the_settings(file: str, setting: str, factor: float) -> None:
    def size(**options: str) -> int:
        rows = json.loads(config("limits", "--json", **options).output)["limits"]  # type: ignore[arg-type]
        return sum(row["bytes"] for row in rows if row["setting"] == setting)

    assert size(file=file) == pytest.approx(size() * factor)


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ('[redis]\nurl = "redis://localhost"', "commits to Redis"),
        ('[history]\ndir = "history"', "bytes of unwritten history"),
    ],
)
def test_some_limits_apply_only_with_their_setting(file: str, what: str) -> None:
    assert what not in config("limits").output
    assert what in config("limits", file=file).output


def test_without_its_analysis_the_lock_order_takes_no_memory() -> None:
    assert "lock order" not in config("limits", "--lock-order", "off").output
