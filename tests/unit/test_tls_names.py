"""The name that a client certificate gives to a principal."""

from __future__ import annotations

import pytest

from genie.tls import MAX_CERTIFICATE_NAME, certificate_name


@pytest.mark.parametrize(
    ("common_name", "dns_name", "expected"),
    [
        ("a", "b", "a"),
        ("", "b", "b"),
        ("a" * MAX_CERTIFICATE_NAME, "b", "a" * MAX_CERTIFICATE_NAME),
        ("a" * (MAX_CERTIFICATE_NAME + 1), "b", "b"),
        ("", "b" * (MAX_CERTIFICATE_NAME + 1), None),
    ],
)
def test_a_name_is_as_long_as_that_of_a_principal_at_most(
    common_name: str, dns_name: str, expected: str | None
) -> None:
    certificate = {"subject": ((("commonName", common_name),),), "subjectAltName": (("DNS", dns_name),)}
    assert certificate_name(certificate) == expected
