"""The default note of a client says which program, process and host it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from genie.client import note
from genie.client.commands import make_hello
from genie.client.config import resolve_note

HOST = socket.gethostname()


def printed(*arguments: str, code: str = "") -> str:
    """Return what a Python process prints."""
    return subprocess.run(
        [sys.executable, *arguments], input=code, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_note_names_the_script(tmp_path) -> None:
    script = tmp_path / "nightly job.py"
    script.write_text("import os; from genie.client.note import default_note; print(os.getpid(), default_note())")
    pid, _, text = printed(str(script)).partition(" ")
    assert text == f"nightly job.py {pid}@{HOST}"


def test_the_note_names_the_module_after_m(tmp_path) -> None:
    package = tmp_path / "billing"
    package.mkdir()
    code = "from genie.client.note import default_note; print(default_note().split()[0])"
    (package / "__main__.py").write_text(code)
    (package / "worker.py").write_text(code)
    names = [
        subprocess.run(
            [sys.executable, "-m", module], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()
        for module in ("billing", "billing.worker")
    ]
    assert names == ["billing", "billing.worker"]
    assert printed("-c", code) == "python"
    assert printed("-", code=code) == "python"


def test_a_forked_process_has_its_own_note() -> None:
    before = note.default_note()
    assert before.endswith(f" {os.getpid()}@{HOST}")
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, note.default_note().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 1000).decode() == before.replace(str(os.getpid()), str(pid))


def test_any_name_of_a_program_or_host_makes_a_valid_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", object())
    monkeypatch.setattr(sys, "argv", ["/bin/\x1b[31m\udcff" + "ü" * 500])
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 500)
    note._note_of.cache_clear()
    try:
        text = note.default_note()
    finally:
        monkeypatch.undo()
        note._note_of.cache_clear()
    assert text == f"?[31m?{'ü' * 94} {os.getpid()}@{'h' * 100}"
    assert f'"note":"?[31m?{"ü" * 94} '.encode() in make_hello("s" * 16, 10.0, note=text)


def test_the_note_can_be_chosen_and_turned_off() -> None:
    assert resolve_note("worker-7") == "worker-7"
    assert resolve_note("") is None
    assert resolve_note() == note.default_note()
    with pytest.raises(ValueError, match="note"):
        make_hello("s" * 16, 10.0, note="two\nlines")
