"""Pytest hooks that print the report of a failure when it happens, also of one that a worker of xdist sends."""

from __future__ import annotations

import pytest


class FailuresAtOnce:
    """Prints each failed test's traceback and captured output at once; the summary at the end only lists their names."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._wanted = config.option.tbstyle != "no"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when is not None:
            self._print(report, f"{'ERROR' if report.when != 'call' else 'FAILURE'} {report.nodeid}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._print(report, f"ERROR collecting {report.nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._config.option.tbstyle = "no"  # the terminal reporter would print all of them again

    def _print(self, report: pytest.TestReport | pytest.CollectReport, title: str) -> None:
        if not self._wanted:
            return
        terminal = self._config.get_terminal_writer()
        terminal.line()
        terminal.sep("_", title, red=True, bold=True)
        report.toterminal(terminal)
        for name, content in report.sections:
            terminal.sep("-", name)
            terminal.line(content.rstrip("\n"))
        terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Workers send their reports to the controller, which is the one that prints."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config), "failures-at-once")
