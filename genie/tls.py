"""What both sides of a TLS connection need: the files, the name in a certificate, and errors in one line."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MIN_VERSION = ssl.TLSVersion.TLSv1_2


def load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    """Show this certificate (a PEM file, with those that it is signed by behind it).

    Its key is in a file of its own, or in the same. ValueError names the variable and the file of what is wrong.
    """
    _read(certificate, "GENIE_TLS_CERT", b"CERTIFICATE-----", "certificate")
    name = "GENIE_TLS_CERT" if key is None else "GENIE_TLS_KEY"
    _read(key or certificate, name, b"PRIVATE KEY-----", "private key")

    def no_password() -> str:
        raise ValueError(f"{name}: the key in {key or certificate} is encrypted; give one without a password")

    try:
        context.load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the key in {key or certificate} is not that of the certificate in {certificate}"
        else:
            why = f"{certificate}{f' with {key}' if key else ''} can't be used: {describe_error(error)}"
        raise ValueError(f"{name}: {why}") from None


def load_ca(context: ssl.SSLContext, file: str) -> None:
    """Accept what is signed by the certificates of this PEM file; ValueError as above."""
    _read(file, "GENIE_TLS_CA", b"CERTIFICATE-----", "certificate")
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise ValueError(f"GENIE_TLS_CA: {file} can't be used: {describe_error(error)}") from None


def _read(file: str, variable: str, mark: bytes, what: str) -> None:
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{variable}: {file} can't be read: {error.strerror}") from None
    if mark not in content:
        raise ValueError(f"{variable}: there is no {what} in {file}, which must be a PEM file")


def certificate_name(certificate: Mapping[str, Any] | None) -> str | None:
    """Whose certificate it is: the common name of its subject, else the first DNS name.

    `certificate` is what `getpeercert` gives of a verified one. None where there is none, or it has no name.
    """
    for part in (certificate or {}).get("subject", ()):
        for kind, value in part:
            if kind == "commonName" and value:
                return str(value)
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "DNS" and value:
            return str(value)
    return None


WORDS = {
    "WRONG_VERSION_NUMBER": "the other side does not speak TLS",
    "HTTP_REQUEST": "the other side does not speak TLS",
    "RECORD_LAYER_FAILURE": "the other side does not speak TLS",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a certificate of this side",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the other side showed no certificate",
    "TLSV1_ALERT_PROTOCOL_VERSION": "no version of TLS suits both sides",
    "UNSUPPORTED_PROTOCOL": "no version of TLS suits both sides",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know who signed the certificate of this side",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the certificate of this side has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not accept the certificate of this side",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not accept the certificate of this side",
}
"""What OpenSSL's reasons mean, where they would not be understood."""


def describe_error(error: BaseException) -> str:
    """What went wrong, in a few words. Of other errors than those of TLS: what they say."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the other side is not accepted: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"TLS: {WORDS.get(error.reason) or error.reason.lower().replace('_', ' ')}"
    return str(error) or type(error).__name__
