"""`genie run`"""

from __future__ import annotations

from typing import Any

import click

from genie.cli import held_command
from genie.cli.asking import plain_errors, seconds, server_options
from genie.cli.held_command import Order
from genie.cli.sources import WholeNumber
from genie.protocol.resources import from_people

COMMAND = "genie.cli.run.command"


class _TwoParts(click.Command):
    """Takes what stands behind the first `--` away before click reads the rest: click knows only one open end."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, found, command = _split(args)
        ctx.meta[COMMAND] = tuple(command)
        rest = super().parse_args(ctx, own)
        if not found:
            raise click.UsageError("COMMAND is missing: write -- between the resources and the command.", ctx)
        if not any(command[:1]):
            raise click.UsageError("COMMAND is missing behind --.", ctx)
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return ["[OPTIONS]", "RESOURCE...", "--", "COMMAND [ARGUMENT]..."]


def _split(args: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in args:
        return args, False, []
    border = args.index("--")
    return args[:border], True, args[border + 1 :]


def _resource(text: str) -> str:
    try:
        return from_people(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


@click.command(cls=_TwoParts)
@click.argument("resources", nargs=-1, required=True, type=_resource, metavar="RESOURCE...")
@click.option("-n", "--no-wait", is_flag=True, help="Don't wait: give up if the locks can't be had at once.")
@click.option(
    "-w",
    "--wait",
    type=seconds(0),
    metavar="SECONDS",
    help="Give up after so long in the queue. Without -n and -w: never.",
)
@click.option(
    "--timeout",
    "hold",
    type=seconds(0.001),
    metavar="SECONDS",
    help="Hold the locks for so long at most; COMMAND is ended when they are lost. "
    "Without it they are held for as long as COMMAND runs.",
)
@click.option("--transaction", metavar="NAME", help="The one transaction that this is a step of.")
@click.option("--priority", type=float, metavar="N", default=0, help="Higher goes first in the queue. [default: 0]")
@click.option(
    "-E",
    "--conflict-exit-code",
    "conflict_status",
    type=WholeNumber(0, 255),
    metavar="N",
    default=1,
    show_default=True,
    help="Exit status when the locks could not be had.",
)
@click.option(
    "--kill-after",
    type=seconds(0),
    metavar="SECONDS",
    default=10,
    show_default=True,
    help="How long COMMAND may take to end when the locks are lost, between SIGTERM and SIGKILL.",
)
@server_options
@click.pass_context
@plain_errors
def run(ctx: click.Context, /, no_wait: bool, wait: float | None, **options: Any) -> None:
    """Hold locks while COMMAND runs, as flock(1) does.

    RESOURCE is shared:NAME, exclusive:NAME, or a NAME without a colon, which is exclusive. All are locked at once.

    COMMAND finds GENIE_LOCK_ID and GENIE_LOCK_FENCE in its environment, and is sent the SIGTERM, SIGINT, SIGHUP,
    SIGQUIT, SIGUSR1 and SIGUSR2 that genie gets (a Ctrl-C reaches it from the terminal itself). A signal while genie
    still waits for the locks ends genie.

    \b
    Exit status: that of COMMAND (128 + N if signal N ended it), or
      1    the locks could not be had: taken, or a deadlock (-E sets another)
      2    these arguments are wrong
      124  the locks were lost before COMMAND had ended; it was sent SIGTERM,
           and SIGKILL if it went on: undo or repeat what it did
      125  genie failed: no server, or it refused the request
      126  COMMAND could not be executed
      127  COMMAND was not found
      128 + N  signal N came while genie waited

    Without --timeout, locks whose genie was killed end 30 seconds later.
    """  # noqa: D301 - click wants the character itself before a text that must keep its lines
    if no_wait and wait is not None:
        raise click.UsageError("-n does not wait and -w waits: give one of them.", ctx)
    raise SystemExit(held_command.run(Order(command=ctx.meta[COMMAND], wait=0 if no_wait else wait, **options)))
