"""Processes started by tests have the default signal dispositions, whatever the test run has inherited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.processes import dispositions

START = f"""
import subprocess, sys
sys.path.insert(0, {str(Path(dispositions.__file__).parents[2])!r})
from support.processes import dispositions
dispositions.restore_defaults_for_children()
subprocess.run([sys.executable, "-S", "-c", '''
import signal
print(sorted(signal.Signals(n).name for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN))
'''])
"""


def test_children_have_the_default_dispositions() -> None:
    in_the_background = ["sh", "-c", 'trap "" HUP INT QUIT TERM USR1; exec "$@"', "sh"]
    command = [*in_the_background, sys.executable, "-S", "-c", START]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['SIGPIPE', 'SIGXFSZ']\n", done.stderr  # Python itself ignores these two


def test_the_test_run_still_ignores_the_signals() -> None:
    script = START + "\nimport os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nprint('lives', flush=True)"
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-S", "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("lives\n")
