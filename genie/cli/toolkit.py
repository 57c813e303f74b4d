"""Public API for other applications, whose commands look and behave like the commands of `genie`."""

from __future__ import annotations

from genie.cli.configuration import ConfigurationError, read_document
from genie.cli.lazy_group import LazyGroup
from genie.cli.options import (
    RESPONSE_TIMEOUT_S,
    WholeNumber,
    json_option,
    one_line,
    one_line_errors,
    seconds,
    server_options,
)
from genie.cli.output import print_json, print_lines, print_message
from genie.client.aio import Client
from genie.client.config import ClientOptions, parse_addresses
from genie.text import printable_json

__all__ = [
    "ConfigurationError",
    "LazyGroup",
    "WholeNumber",
    "command_client",
    "json_option",
    "one_line",
    "one_line_errors",
    "print_json",
    "print_lines",
    "print_message",
    "printable_json",
    "read_document",
    "seconds",
    "server_options",
]


def command_client(host: str, port: int, namespace: str | None) -> Client:
    """Return a client for the values of `server_options`. Entering the client fails at once if no server answers."""
    options = ClientOptions(response_timeout=RESPONSE_TIMEOUT_S, namespace=namespace, waits_for_servers=False)
    return Client(parse_addresses(host, port), options)
