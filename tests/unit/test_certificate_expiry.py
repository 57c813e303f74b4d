"""When the certificate in a PEM file expires."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from pathlib import Path

import pytest

from genie.tls import certificate_expiry
from support.network.certificates import Certificates


@pytest.mark.parametrize("year", [2033, 2049, 2050, 2077])  # from 2050 on the encoding has another type
def test_the_expiry_of_a_certificate(tmp_path: Path, year: int) -> None:
    until = datetime(year, 2, 28, 13, 14, 15, tzinfo=UTC)
    file = Certificates(tmp_path).issue("limited", "locks.example", until=until)
    assert certificate_expiry(str(file)) == until.timestamp()


def test_a_file_without_a_whole_certificate_is_an_error(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    section = certificates.server.read_text().partition("-----BEGIN CERTIFICATE-----")[2].partition("-----END")[0]
    file = tmp_path / "damaged.pem"
    for content in (b"", base64.b64decode(section)[:60]):
        encoded = base64.b64encode(content).decode()
        file.write_text(f"-----BEGIN CERTIFICATE-----\n{encoded}\n-----END CERTIFICATE-----\n")
        with pytest.raises(ValueError, match="truncated"):
            certificate_expiry(str(file))
    file.write_text("nothing")
    with pytest.raises(ValueError, match="no certificate"):
        certificate_expiry(str(file))
