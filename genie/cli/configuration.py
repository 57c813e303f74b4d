"""The settings of `genie serve`. The value of a setting comes from the first of these sources that has it: option, variable,
file, default.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from genie.cli.options import FILE_SOURCES, InvalidArgument, replace_variables_by_options, source_of
from genie.config import GROUPS, SECRETS, Settings, file_key
from genie.files import read_regular_file

LEDGER = "ledger"
"""The section that describes a ledger for the application `genie-ledger`. The server ignores it."""

OPTION_ONLY = frozenset({"config", "as_json", "help"})
"""Parameters of commands that are not keys of the file."""
PATHS = frozenset({"token_file", "tls_cert", "tls_key", "tls_ca"})
"""Options that are paths. In the file they are relative to the folder of the file."""
RANKS = {ParameterSource.COMMANDLINE: 3, ParameterSource.ENVIRONMENT: 2, ParameterSource.DEFAULT_MAP: 1}
"""The precedence of the sources. `DEFAULT_MAP`, click's name for a source of defaults, stands for the file."""


class ConfigurationError(InvalidArgument, ValueError):
    """The file is invalid. `errors` has a line for each error."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors

    def __str__(self) -> str:
        """Return all errors in one line, for the log."""
        return "; ".join(self.errors)


class Configuration:
    """The options of a running command, and the file that it names. `load` can be called again, after the file has changed."""

    def __init__(self, ctx: click.Context, options: Mapping[str, Any]) -> None:
        self._ctx = ctx
        self._given = dict(options)
        """The values of the command line, the environment and the defaults."""
        self._sources = {name: ctx.get_parameter_source(name) for name in options}
        self.path: str | None = self._given.pop("config", None)
        """The path of the file, if there is one."""
        self.origins: dict[str, str] = {}
        """By the name of a setting: the option, the variable or the key of the file that has set it, or `default`."""

    def load(self) -> Settings:
        """Read the file, and return the settings. Raises InvalidArgument if the file or a combination is invalid.

        Afterwards the error messages of the command name the keys of the file.
        """
        in_file = {} if self.path is None else read_file(self.path, self._ctx.command.params)
        options = dict(self._given)
        self._ctx.meta[FILE_SOURCES] = {}
        for name, source in self._sources.items():
            if name in OPTION_ONLY:
                continue
            from_file = RANKS.get(source, 0) == 0 and name in in_file  # type: ignore[arg-type] # None: no source
            if from_file:
                options[name] = in_file[name]
                self._ctx.meta[FILE_SOURCES][name] = f"{file_key(name)} in {self.path}"
            self._ctx.set_parameter_source(
                name, ParameterSource.DEFAULT_MAP if from_file else source or ParameterSource.DEFAULT
            )
        self.origins = {name: source_of(name) if self._rank(name) else "default" for name in options}
        return Settings.from_options(**self._with_redis_url(options))

    def _with_redis_url(self, options: dict[str, Any]) -> dict[str, Any]:
        """Replace the host and the port of Redis by a URL, unless the URL comes from the same source or a preceding one."""
        host, port = options.pop("redis_host"), options.pop("redis_port")
        separate = [name for name, value in (("redis_host", host), ("redis_port", port)) if value]
        rank = max((self._rank(name) for name in separate), default=0)
        if separate and (options["redis_url"] is None or self._rank("redis_url") < rank):
            host = host or "127.0.0.1"
            options["redis_url"] = f"redis://{f'[{host}]' if ':' in host else host}:{port or 6379}/0"
            self.origins["redis_url"] = source_of(max(separate, key=self._rank))
        if options["redis_url"] is None and (options["redis_min_replicas"] or options["redis_fsync"]):
            raise InvalidArgument(
                f"{source_of('redis_min_replicas')} and {source_of('redis_fsync')} require "
                f"{source_of('redis_url')} or {source_of('redis_host')}"
            )
        return options

    def _rank(self, name: str) -> int:
        source = self._ctx.get_parameter_source(name)
        return 0 if source is None else RANKS.get(source, 0)

    def read_again(self) -> Settings:
        """Return the settings with the current content of the file. Raises ValueError if the file is invalid."""
        with self._ctx.scope(cleanup=False):
            try:
                return self.load()
            except ConfigurationError:
                raise
            except click.ClickException as error:
                raise ValueError(replace_variables_by_options(error.message)) from None


def read_document(path: str) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigurationError if the file can't be read, or is not TOML."""
    try:
        return tomllib.loads(read_regular_file(path)[0].decode())
    except OSError as error:
        raise ConfigurationError([f"{path}: can't be read: {error.strerror or error}"]) from None
    except UnicodeDecodeError:
        raise ConfigurationError([f"{path}: must be text in UTF-8"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError([f"{path}: is not TOML: {error}"]) from None
    except RecursionError:
        raise ConfigurationError([f"{path}: is not TOML: its values are nested too deeply"]) from None


def read_file(path: str, params: Iterable[click.Parameter]) -> dict[str, Any]:
    """Return the values of a file by the names of the options `params`. Raises ConfigurationError with all errors."""
    document = read_document(path)
    if isinstance(document.get(LEDGER), dict):
        del document[LEDGER]
    by_key = {file_key(name): param for param in params if (name := param.name) and name not in OPTION_ONLY}
    values: dict[str, Any] = {}
    errors = []
    for key, value in _flatten_sections(document):
        if key not in by_key:
            errors.append(f"{path}: {_unknown(key, value, by_key)}")
            continue
        param = by_key[key]
        assert param.name is not None  # noqa: S101 - `by_key` has named parameters only
        try:
            values[param.name] = _convert(param, value)
        except ValueError as error:
            errors.append(f"{path}: {key}: {error}")
        if param.name in PATHS and param.name in values:
            values[param.name] = str(Path(path).parent / values[param.name])
    if errors:
        raise ConfigurationError(errors)
    return values


def _flatten_sections(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each key of a document with its value. A key of a known section (`GROUPS`) is yielded as `section.key`.

    An unknown section is yielded like a key, so that the caller rejects it.
    """
    for name, value in document.items():
        if name in GROUPS and isinstance(value, dict):
            for key, inner in value.items():
                yield f"{name}.{key}", inner
        else:
            yield name, value


def _unknown(key: str, value: object, by_key: Mapping[str, click.Parameter]) -> str:
    """Describe a key that does not exist, with the key that may be meant."""
    if key in GROUPS:
        return f"{key}: must be a section, [{key}]"
    if isinstance(value, dict):
        near = difflib.get_close_matches(key, GROUPS, 1)
        hint = f"did you mean [{near[0]}]?" if near else f"the sections are {', '.join(f'[{name}]' for name in GROUPS)}"
        return f"[{key}]: unknown section; {hint}"
    # A key may be written in the wrong section, by the name of its option, or with hyphens.
    candidates = {known: known for known in by_key} | {str(param.name): known for known, param in by_key.items()}
    for known in by_key:
        candidates.setdefault(known.rpartition(".")[2], known)
    written = key.replace("-", "_")
    section, _, name = written.rpartition(".")
    # Prefer a key of the same section to a key of the same name elsewhere.
    in_section = [known for known in by_key if known.rpartition(".")[0] == section]
    near = (
        difflib.get_close_matches(written, in_section, 1, 0.8)
        or [candidates[text] for text in (name, written) if text in candidates]
        or [candidates[text] for text in difflib.get_close_matches(written, candidates, 1, 0.7)]
    )
    return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")


def _convert(param: click.Parameter, value: Any) -> Any:
    """Convert the value of a key to the value of its option.

    Raises ValueError if the value is invalid, or has the wrong type in TOML: a number is not accepted as a string. The
    message says which values are valid, and does not contain the value of a secret.
    """
    kind = param.type
    expected, right = _EXPECTED.get(type(kind).__name__, (str, "a string"))
    shown = "" if param.name in SECRETS else f", not {_as_toml(value)}"
    is_right = isinstance(value, expected) and (isinstance(value, bool) == (expected is bool))
    if type(kind).__name__ == "AdminPortType" and value == "":
        return None
    if not is_right or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
        raise ValueError(f"must be {right}{shown}")
    if value in ("", []):
        raise ValueError("must not be empty; leave out the key for the default")
    try:
        return kind.convert(value, param, None)
    except click.BadParameter as error:
        raise ValueError(error.message.rstrip(".")) from None


_EXPECTED: dict[str, tuple[Any, str]] = {
    "BoolParamType": (bool, "true or false"),
    "WholeNumber": (int, "a whole number"),
    "PortType": (int, "a port number"),
    "AdminPortType": (int, 'a port number, or "" for no admin port'),
    "Number": (int | float, "a number"),
    "NamespaceListType": (list, 'an array of names, such as ["genie"]'),
}
"""By the type of an option: the type of its value in the file, and how an error message describes it."""


def _as_toml(value: object) -> str:
    """Return a value for an error message, as it is written in the file, or shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"  # noqa: PLR2004 - enough to recognize it
