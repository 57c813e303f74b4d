"""Logs contain no secrets (tracebacks have no values of variables), and nothing that controls a terminal."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import genie
from genie.text import is_printable

SCRIPT = """
import sys
from genie.observability import logs
import structlog
logs.configure("info", sys.argv[1])
def fails():
    password = "".join(["hush", "hush"])
    raise RuntimeError("the error " + str(len(password)))
try:
    fails()
except RuntimeError as error:
    structlog.get_logger().error("a defect", exc_info=error)
"""


@pytest.mark.parametrize("form", ["console", "json"])
def test_tracebacks_contain_no_values_of_variables(form: str) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT, form], capture_output=True, text=True, check=True)
    assert "the error 8" in result.stdout
    assert "fails" in result.stdout
    assert "hushhush" not in result.stdout


HOSTILE = """
from genie.observability import logs
import structlog
import sys
logs.configure("info", sys.argv[1])
structlog.get_logger().warning("rejected", path="/\\u009b2J\\u202e\\u2028x", names=["\\u009b", "\\u3164"], nested={"\\u202e": "\\x1b[2J"})
try:
    raise RuntimeError("failed at \\u009b2J\\u202e\\x1b[2J")
except RuntimeError as error:
    structlog.get_logger().error("defect", exc_info=error)
"""


@pytest.mark.parametrize(
    ("form", "path"), [("console", r"path=/\x9b2J\u202e\u2028x"), ("json", r'"path":"/\u009b2J\u202e\u2028x"')]
)
def test_the_log_shows_control_characters_as_escapes(form: str, path: str) -> None:
    result = subprocess.run([sys.executable, "-c", HOSTILE, form], capture_output=True, text=True, check=True)
    lines = result.stdout.split("\n")
    assert all(map(is_printable, lines))
    assert path in lines[0]
    if form == "json":
        assert json.loads(lines[0])["path"] == "/\x9b2J\u202e\u2028x"


NOT_ENCODABLE = """
from genie.observability import logs
import structlog
logs.configure("info", "console")
structlog.get_logger().info("one", name="\u65e5\u672c")
structlog.get_logger().info("two")
"""


def test_the_log_escapes_characters_that_the_encoding_of_stdout_lacks() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    result = subprocess.run(
        [sys.executable, "-c", NOT_ENCODABLE], capture_output=True, text=True, check=True, env=environment
    )
    one, two = result.stdout.splitlines()
    assert r"name=\u65e5\u672c" in one
    assert "two" in two


def test_the_field_for_the_text_of_an_error_has_one_name() -> None:
    fields = {
        (path.name, keyword.arg)
        for path in Path(genie.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in {"debug", "info", "warning", "error"}
        for keyword in call.keywords
    }
    assert "reason" in {field for _, field in fields}
    assert [each for each in sorted(fields, key=str) if each[1] == "error"] == []


UNREAD = """
import os, sys
from genie.observability import logs
import structlog
logs.configure("info", "json")
log = structlog.get_logger()
reader, writer = os.pipe()
os.set_blocking(writer, False)  # a write that would block is an error
os.set_blocking(reader, False)
os.dup2(writer, 1)
while True:
    try:
        os.write(1, b"x" * 4096)
    except BlockingIOError:
        break
log.info("one")
log.info("two")
while os.read(reader, 4096)[-1:] == b"x":
    if not logs.select.select([reader], [], [], 0)[0]:
        break
log.info("three")
sys.stderr.buffer.write(os.read(reader, 65536))
"""


def test_lines_that_stdout_does_not_accept_are_omitted_and_counted() -> None:
    result = subprocess.run([sys.executable, "-c", UNREAD], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert [(line["event"], line.get("count")) for line in lines] == [("log entries omitted", 2), ("three", None)]


LONG_LINES = """
import os, sys
from genie.observability import logs
import structlog
logs.configure("info", "json")
log = structlog.get_logger()
reader, writer = os.pipe()
os.set_blocking(reader, False)
os.dup2(writer, 1)
for number in range(100):
    log.info("long", number=number, text="x" * int(sys.argv[1]))  # returns although nothing is read
for _ in range(3):
    try:
        while data := os.read(reader, 65536):
            sys.stderr.buffer.write(data)
    except BlockingIOError:
        log.info("last")
sys.stderr.buffer.write(os.read(reader, 65536))
"""


@pytest.mark.parametrize("size", [1_500, 5_000, 12_000, 70_000])
def test_long_lines_do_not_wait_for_stdout_and_are_written_whole(size: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LONG_LINES, str(size)], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    written = [line for line in lines if line["event"] == "long"]
    assert written == lines[: len(written)]
    assert [(line["number"], len(line["text"])) for line in written] == [(n, size) for n in range(len(written))]
    omitted, *last = lines[len(written) :]
    assert (omitted["event"], {line["event"] for line in last}) == ("log entries omitted", {"last"})
    assert len(written) + omitted["count"] + len(last) == 100 + 3


FULL_DISK = """
import os, sys
from genie.observability import logs
import structlog
logs.configure("info", "json")
log = structlog.get_logger()
file = os.dup(1)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
for _ in range(5):
    log.info("one")
os.dup2(file, 1)
log.info("two")
"""


def test_the_log_continues_when_the_disk_is_no_longer_full() -> None:
    result = subprocess.run([sys.executable, "-c", FULL_DISK], capture_output=True, text=True, check=True)
    *_, omitted, last = map(json.loads, result.stdout.splitlines())
    assert (omitted["event"], omitted["count"]) == ("log entries omitted", 5)
    assert last["event"] == "two"


THREADS = """
import os, threading
from genie.observability import logs
import structlog
logs.configure("info", "json")
log = structlog.get_logger()
reader, writer = os.pipe()
os.set_blocking(writer, False)  # a write that would block is an error
os.dup2(writer, 1)
try:
    while True:
        os.write(1, b"x" * 4096)
except BlockingIOError:
    pass
begun = threading.Barrier(2)
def wait_and_log():
    begun.wait()
    log.info("a line")  # both threads wait for the pipe
    os.write(2, b"logged ")
thread = threading.Thread(target=wait_and_log)
thread.start()
wait_and_log()
thread.join()
"""


def test_two_threads_can_log_while_stdout_accepts_nothing() -> None:
    result = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "logged logged ")


def test_a_process_without_stdout_can_log() -> None:
    script = (
        "import os, subprocess, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-c', sys.argv[1], 'json'])"
    )
    result = subprocess.run([sys.executable, "-c", script, SCRIPT], stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
