"""The command-line program `genie`: one module for each command."""

from __future__ import annotations

import click

from genie.cli.lazy_group import LazyGroup
from genie.version import VERSION

SECTIONS = {
    "Locks": {
        "run": "Run a command while it holds locks, as flock(1) does.",
        "release": "Release a lock, cancel a waiting request, or clean up after a crash.",
        "watch": "Print locks and unlocks as they happen.",
    },
    "Look inside": {
        "inspect": "List held locks, and waiting requests with their blockers.",
        "explain": "Explain why a request waits, or which requests wait for a lock.",
        "waits": "Print the wait-for graph, a line for each edge.",
        "top": "Show a live view of a server: queues, waits and hot resources.",
        "deadlocks": "Show the latest deadlocks, each with its cycle.",
        "order": "Show in which order transactions take locks, and which orders can deadlock.",
        "history": "Show who requested a lock, waited and held it, from recorded files.",
        "replay": "Repeat recorded steps, also with other priorities or timeouts.",
    },
    "Operate": {
        "serve": "Start a server.",
        "status": "Check that a server responds.",
        "config": "Check the settings of a server, and show where each comes from.",
        "store": "Check, back up and restore a namespace in Redis.",
        "bench": "Measure the throughput and the latency of a server.",
    },
}
"""The descriptions of the commands in `genie --help`, by section. They are here, and not in the modules of the commands, so
that the help also works if the optional dependencies of a command are not installed."""

COMMANDS = tuple(sorted(name for section in SECTIONS.values() for name in section))


class _Genie(LazyGroup):
    """The program, whose help lists the commands in sections."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))


@click.group(
    "genie",
    cls=_Genie,
    package=__name__,
    names=COMMANDS,
    requirement="genie-lock[server]",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(VERSION, prog_name="genie")
def main() -> None:
    """Lock resources in transactions that span services, and look after a lock server.

    `genie COMMAND --help` shows the options of a command.
    """
