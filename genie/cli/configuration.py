"""The settings of `genie serve`. A setting has the value of the first of these sources that contains it: command line,
environment variable, configuration file, default.
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
from genie.net import format_host_port

LEDGER = "ledger"
"""The section that describes a ledger for the application `genie-ledger`. The server ignores it."""

OPTION_ONLY = frozenset({"config", "as_json", "help"})
"""Options that the file cannot set."""
PATHS = frozenset({"token_file", "tls_cert", "tls_key", "tls_ca"})
"""Options that are paths. In the file they are relative to the folder of the file."""
MAX_SHOWN_VALUE = 60
"""Maximum number of characters of an invalid value in an error message."""
FROM_FILE = ParameterSource.DEFAULT_MAP
"""The source of an option that the configuration file sets. For click, the file is a map of defaults."""
RANKS = {ParameterSource.COMMANDLINE: 3, ParameterSource.ENVIRONMENT: 2, FROM_FILE: 1}
"""The precedence of the sources: the greatest rank wins. Defaults have the rank 0."""


class ConfigurationError(InvalidArgument, ValueError):
    """The configuration file is invalid. `errors` has a line for each error."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors

    def __str__(self) -> str:
        """Return all errors in one line, for the log."""
        return "; ".join(self.errors)


class Configuration:
    """The options of a running command, and the configuration file that they name.

    `load` can be called again, after the file has changed.
    """

    def __init__(self, ctx: click.Context, options: Mapping[str, Any]) -> None:
        self._ctx = ctx
        self._options_without_file = dict(options)
        """The values of the command line, the environment and the defaults."""
        self._sources_without_file = {
            name: ctx.get_parameter_source(name) or ParameterSource.DEFAULT for name in options
        }
        self.path: str | None = self._options_without_file.pop("config", None)
        """The path of the file, or None."""
        self.origins: dict[str, str] = {}
        """By the name of a setting: the option, the variable or the key of the file that has set it, or `default`."""

    def load(self) -> Settings:
        """Read the file, and return the settings. Raises InvalidArgument if the file or a combination is invalid.

        Afterwards the error messages of the command name the keys of the file.
        """
        values_in_file = {} if self.path is None else read_file(self.path, self._ctx.command.params)
        options = dict(self._options_without_file)
        self._ctx.meta[FILE_SOURCES] = {}
        for name, source in self._sources_without_file.items():
            if name in OPTION_ONLY:
                continue
            if name in values_in_file and source not in RANKS:  # neither the command line nor a variable has set it
                options[name] = values_in_file[name]
                self._ctx.meta[FILE_SOURCES][name] = f"{file_key(name)} in {self.path}"
                self._ctx.set_parameter_source(name, FROM_FILE)
            else:
                self._ctx.set_parameter_source(name, source)
        self.origins = {name: source_of(name) if self._rank(name) else "default" for name in options}
        self._combine_redis_options(options)
        return Settings.from_options(**options)

    def _combine_redis_options(self, options: dict[str, Any]) -> None:
        """Replace the options for the host and the port of Redis by the option for its URL.

        A URL from the same source, or a source of higher precedence, is not changed. Raises InvalidArgument if an option
        needs Redis, and no Redis is given.
        """
        host, port = options.pop("redis_host"), options.pop("redis_port")
        given = [name for name, value in (("redis_host", host), ("redis_port", port)) if value]
        if given:
            highest = max(given, key=self._rank)
            if options["redis_url"] is None or self._rank("redis_url") < self._rank(highest):
                options["redis_url"] = f"redis://{format_host_port(host or '127.0.0.1', port or 6379)}/0"
                self.origins["redis_url"] = source_of(highest)
        if options["redis_url"] is None and (options["redis_min_replicas"] or options["redis_fsync"]):
            raise InvalidArgument(
                f"{source_of('redis_min_replicas')} and {source_of('redis_fsync')} require "
                f"{source_of('redis_url')} or {source_of('redis_host')}"
            )

    def _rank(self, name: str) -> int:
        """Return the rank of the source that has set an option."""
        source = self._ctx.get_parameter_source(name)
        return 0 if source is None else RANKS.get(source, 0)

    def read_again(self) -> Settings:
        """Return the settings, with the current content of the file, after the command has started.

        Raises ValueError if the file is invalid. Its message names the options and keys to correct.
        """
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
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        raise ConfigurationError([f"{path}: is not TOML: {error}"]) from None
    except RecursionError:
        raise ConfigurationError([f"{path}: is not TOML: its values are nested too deeply"]) from None


def read_file(path: str, params: Iterable[click.Parameter]) -> dict[str, Any]:
    """Return the values of a configuration file, by the names of the options `params`.

    Raises ConfigurationError, which has all errors of the file.
    """
    document = read_document(path)
    if isinstance(document.get(LEDGER), dict):
        del document[LEDGER]
    param_by_key = {file_key(name): param for param in params if (name := param.name) and name not in OPTION_ONLY}
    values: dict[str, Any] = {}
    errors = []
    for key, value in _flatten_sections(document):
        if key not in param_by_key:
            errors.append(f"{path}: {_describe_unknown_key(key, value, param_by_key)}")
            continue
        param = param_by_key[key]
        name = str(param.name)
        try:
            converted = _convert(param, value)
        except ValueError as error:
            errors.append(f"{path}: {key}: {error}")
            continue
        values[name] = str(Path(path).parent / converted) if name in PATHS else converted
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


def _describe_unknown_key(key: str, value: object, param_by_key: Mapping[str, click.Parameter]) -> str:
    """Return an error message for a key that does not exist, with the key that may be meant."""
    if key in GROUPS:
        return f"{key}: must be a section, [{key}]"
    if isinstance(value, dict):
        similar_sections = difflib.get_close_matches(key, GROUPS, n=1)
        if similar_sections:
            return f"[{key}]: unknown section; did you mean [{similar_sections[0]}]?"
        return f"[{key}]: unknown section; the sections are {', '.join(f'[{name}]' for name in GROUPS)}"
    similar_key = _find_similar_key(key.replace("-", "_"), param_by_key)
    return f"{key}: unknown key" if similar_key is None else f"{key}: unknown key; did you mean {similar_key}?"


def _find_similar_key(key: str, param_by_key: Mapping[str, click.Parameter]) -> str | None:
    """Return the key that is probably meant by an unknown key, or None. Prefers a similar key of the same section."""
    section, _, name_in_section = key.rpartition(".")
    same_section = [known for known in param_by_key if known.rpartition(".")[0] == section]
    similar_keys = difflib.get_close_matches(key, same_section, n=1, cutoff=0.8)
    if similar_keys:
        return similar_keys[0]
    # The key may be in the wrong section, or have the name of its option.
    key_by_text = {known: known for known in param_by_key}
    key_by_text |= {str(param.name): known for known, param in param_by_key.items()}
    for known in param_by_key:
        key_by_text.setdefault(known.rpartition(".")[2], known)
    for text in (name_in_section, key, *difflib.get_close_matches(key, key_by_text, n=1, cutoff=0.7)):
        if text in key_by_text:
            return key_by_text[text]
    return None


def _convert(param: click.Parameter, value: Any) -> Any:
    """Convert the value of a key to the value of its option.

    Raises ValueError if the value is invalid, or has the wrong type in TOML: a number is not accepted as a string. The
    message says which values are valid, and does not contain the value of a secret.
    """
    option_type = type(param.type).__name__
    if option_type == "AdminPortType" and value == "":
        return None
    expected_type, expected_text = _EXPECTED.get(option_type, (str, "a string"))
    has_expected_type = isinstance(value, expected_type)
    if isinstance(value, bool):  # a bool is also an int
        has_expected_type = expected_type is bool
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        has_expected_type = False
    if not has_expected_type:
        actual_value = "" if param.name in SECRETS else f", not {_as_toml(value)}"
        raise ValueError(f"must be {expected_text}{actual_value}")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("must not contain a null character")
    if value in ("", []):
        raise ValueError("must not be empty; leave out the key for the default")
    try:
        return param.type.convert(value, param, None)
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
    """Return a value for an error message, as it is written in the file. A long value is truncated."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_VALUE else f"{text[:MAX_SHOWN_VALUE]}…"
