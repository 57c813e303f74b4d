"""A file that a reload reads never makes the event loop wait for another process."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from genie.access import AccessControl
from genie.cli.configuration import ConfigurationError, read_document
from genie.files import open_regular_file, read_regular_file
from genie.tls import certificate_expiry, load_ca, load_certificate

READERS: dict[str, Callable[[str], object]] = {
    "token file": lambda path: AccessControl.load(None, path),
    "configuration file": read_document,
    "certificate": lambda path: load_certificate(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), path, None),
    "CA": lambda path: load_ca(ssl.create_default_context(), path),
    "expiry": certificate_expiry,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_fifo_is_an_error(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises((ValueError, OSError, ConfigurationError), match="not a regular file"):
        READERS[reader](str(path))


def test_a_device_is_an_error() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_regular_file("/dev/zero")


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    """Kubernetes mounts the files of a secret as links."""
    (tmp_path / "content").write_bytes(b"content")
    (tmp_path / "link").symlink_to("content")
    assert read_regular_file(str(tmp_path / "link"), 4)[0] == b"cont"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_file_of_the_history_that_is_not_regular_counts_as_missing(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        open_regular_file(tmp_path / "file")
