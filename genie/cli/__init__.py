"""`genie`: the command line. One file a command."""

from __future__ import annotations

import click

from genie.cli.bench import bench
from genie.cli.deadlocks import deadlocks
from genie.cli.explain import explain
from genie.cli.inspect import inspect
from genie.cli.release import release
from genie.cli.run import run
from genie.cli.serve import serve
from genie.cli.status import status
from genie.cli.timeouts import timeouts
from genie.cli.top import top
from genie.cli.waits import waits
from genie.cli.watch import watch


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="genie-lock", prog_name="genie")
def main() -> None:
    """Locks for transactions that span services."""


main.add_command(bench)
main.add_command(deadlocks)
main.add_command(explain)
main.add_command(inspect)
main.add_command(release)
main.add_command(run)
main.add_command(serve)
main.add_command(status)
main.add_command(timeouts)
main.add_command(top)
main.add_command(waits)
main.add_command(watch)
