"""TLS for client and server: loading PEM files, the name in a certificate, and readable error messages."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from genie.files import read_regular_file

MIN_VERSION = ssl.TLSVersion.TLSv1_2

_PEM_CERTIFICATE = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END ", re.DOTALL)
_DER_VERSION, _DER_UTC_TIME, _DER_LONG_LENGTH = 0xA0, 0x17, 0x80
"""Tags of a version and of a time with a two-digit year (RFC 5280), and the flag of a length of several bytes."""


def load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    """Load the certificate that this process presents to its peers into a TLS context.

    `certificate` is the path of a PEM file, which may also contain the chain of CA certificates. `key` is the path of
    the private key. None: the certificate file also contains the key.

    Raises:
        ValueError: if a file is invalid; the message names the environment variable and the file.

    """
    _check_pem(certificate, "GENIE_TLS_CERT", marker=b"CERTIFICATE-----", kind="certificate")
    key_variable = "GENIE_TLS_CERT" if key is None else "GENIE_TLS_KEY"
    _check_pem(key or certificate, key_variable, marker=b"PRIVATE KEY-----", kind="private key")

    def no_password() -> str:  # OpenSSL calls this function if the key is encrypted
        raise ValueError(f"{key_variable}: the key in {key or certificate} is encrypted; give one without a password")

    try:
        context.load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"the key in {key or certificate} does not belong to the certificate in {certificate}"
        else:
            problem = f"{certificate}{f' with {key}' if key else ''} can't be used: {describe_error(error)}"
        raise ValueError(f"{key_variable}: {problem}") from None


def load_ca(context: ssl.SSLContext, file: str) -> None:
    """Trust the CA certificates in a PEM file. Raises ValueError, which names GENIE_TLS_CA, if the file is invalid."""
    _check_pem(file, "GENIE_TLS_CA", marker=b"CERTIFICATE-----", kind="certificate")
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise ValueError(f"GENIE_TLS_CA: {file} can't be used: {describe_error(error)}") from None


def _check_pem(file: str, variable: str, *, marker: bytes, kind: str) -> None:
    """Raise ValueError if a file can't be read, or contains no PEM section of the given kind.

    OpenSSL's own errors for these cases are unclear. `variable` is the environment variable that the message names.
    `marker` is the end of the section's first line.
    """
    try:
        content, _ = read_regular_file(file)
    except OSError as error:
        raise ValueError(f"{variable}: {file} can't be read: {error.strerror}") from None
    if marker not in content:
        raise ValueError(f"{variable}: there is no {kind} in {file}, which must be a PEM file")


def certificate_expiry(file: str) -> float:
    """Return the Unix time at which the first certificate in a PEM file expires. Raises ValueError if there is none.

    Python decodes the certificates of peers only, so this function reads the field `validity` of the DER encoding itself.
    """
    section = _PEM_CERTIFICATE.search(read_regular_file(file)[0])
    if section is None:
        raise ValueError(f"there is no certificate in {file}")
    der = base64.b64decode(section[1])
    try:
        _, at, _ = _der_element(der, 0)  # the certificate
        _, at, _ = _der_element(der, at)  # its signed part
        tag, _, end = _der_element(der, at)
        if tag == _DER_VERSION:
            at = end
        for _ in ("serial number", "signature algorithm", "issuer"):
            _, _, at = _der_element(der, at)
        _, at, _ = _der_element(der, at)  # validity
        _, _, at = _der_element(der, at)  # not before
        tag, at, end = _der_element(der, at)  # not after
    except IndexError:
        raise ValueError(f"the certificate in {file} is truncated") from None
    text = der[at:end].decode("ascii")
    if tag == _DER_UTC_TIME:  # the year has two digits, from 1950 to 2049
        text = f"{'20' if text < '50' else '19'}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _der_element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the DER element at a position, and where its content starts and ends. Raises IndexError."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & _DER_LONG_LENGTH:
        size = length & ~_DER_LONG_LENGTH
        length, start = int.from_bytes(der[start : start + size], "big"), start + size
    return tag, start, start + length


MAX_CERTIFICATE_NAME = 128
"""Characters of the name in a certificate, as of the name of a principal. A certificate may have a DNS name of 16 KiB."""


def certificate_name(certificate: Mapping[str, Any] | None) -> str | None:
    """Return the name in a verified certificate: the common name of the subject, else the first DNS name.

    `certificate` is the result of `getpeercert`. Returns None if there is no certificate, or no name in it.
    """
    for attributes in (certificate or {}).get("subject", ()):  # a tuple of (kind, value) pairs for each level
        for kind, value in attributes:
            if kind == "commonName" and 0 < len(value) <= MAX_CERTIFICATE_NAME:
                return str(value)
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "DNS" and 0 < len(value) <= MAX_CERTIFICATE_NAME:
            return str(value)
    return None


OPENSSL_ERRORS = {
    "WRONG_VERSION_NUMBER": "the peer does not speak TLS",
    "HTTP_REQUEST": "the peer does not speak TLS",
    "RECORD_LAYER_FAILURE": "the peer does not speak TLS",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer requires a certificate, and none was presented",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer presented no certificate",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the peer supports none of the allowed TLS versions",
    "UNSUPPORTED_PROTOCOL": "the peer supports none of the allowed TLS versions",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer does not trust the CA of the presented certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the presented certificate has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer rejected the presented certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the peer rejected the presented certificate",
}
"""Readable texts for OpenSSL's reason codes of a failed handshake."""


def describe_error(error: BaseException) -> str:
    """Return a short readable message for a connection error. OpenSSL's reason codes are replaced by plain texts."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verification failed: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"TLS: {OPENSSL_ERRORS.get(error.reason) or error.reason.lower().replace('_', ' ')}"
    return str(error) or type(error).__name__
