"""The command line of the conformance kit. See README.md.

python -m conformance client [options] -- COMMAND…
python -m conformance server [options] HOST:PORT
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from conformance import client_runner, server_runner
from conformance.cases import Case, load, select
from conformance.report import print_result, print_summary

EPILOG = "Exit status: 0 if no case failed, 1 if a case failed, 2 for wrong usage."


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__, epilog=EPILOG)
    directions = parser.add_subparsers(dest="direction", required=True)
    for direction, text in (("client", "test a client by its adapter"), ("server", "test a running server")):
        sub = directions.add_parser(direction, help=text, epilog=EPILOG)
        sub.add_argument(
            "--filter", action="append", default=[], help="part of a name, or a rule or section; repeatable"
        )
        sub.add_argument("--without", action="append", default=[], help="a capability that is missing; repeatable")
        sub.add_argument("--jobs", type=int, default=8, help="cases at the same time (8)")
        sub.add_argument("--limit", type=float, default=20.0, help="seconds to wait for anything that must happen (20)")
        sub.add_argument("--json", action="store_true", help="print the results as JSON")
        sub.add_argument("--list", action="store_true", help="print the cases and what they test, and run none")
        if direction == "client":
            sub.add_argument("command", nargs="*", help="the adapter with its arguments, after --")
        else:
            sub.add_argument("address", nargs="?", help="HOST:PORT of the server")
            sub.add_argument("--follower", help="HOST:PORT of a follower of the server")
            sub.add_argument("--token", help="a token of the server, for a server that requires tokens")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the cases, print the results, and return the exit status."""
    options = parse(sys.argv[1:])
    cases = select(load(options.direction), options.filter)
    if options.list or not cases:
        for case in cases:
            print(f"{case.source:<22} {case.name}: {case.text}")
        return 0 if options.list else 2
    return _run(options, cases)


def _run(options: argparse.Namespace, cases: Sequence[Case]) -> int:
    common: dict[str, Any] = {
        "without": frozenset(word for text in options.without for word in text.split(",")),
        "jobs": options.jobs,
        "limit_s": options.limit,
        "on_result": (lambda _: None) if options.json else print_result,
    }
    if options.direction == "client":
        if not options.command:
            return _usage("which client? python -m conformance client -- COMMAND")
        if shutil.which(options.command[0]) is None:
            return _usage(f"there is no program {options.command[0]!r}")
        results = asyncio.run(client_runner.run_cases(cases, options.command, **common))
    else:
        if not options.address or not options.address.rpartition(":")[2].isdigit():
            return _usage("which server? python -m conformance server HOST:PORT")
        if not server_runner.is_reachable(options.address):
            return _usage(f"no server accepts connections at {options.address}")
        target = server_runner.Target(options.address, options.follower, options.token)
        results = asyncio.run(server_runner.run_cases(cases, target, **common))
    print_summary(results, as_json=options.json)
    return 1 if any(result.outcome == "failed" for result in results) else 0


def _usage(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
