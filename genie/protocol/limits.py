"""Protocol version, and defaults and limits of command fields, for servers and clients. Lengths are in characters."""

from typing import Final

PROTOCOL: Final = 1
"""The protocol version of this server."""
DEFAULT_TIMEOUT_MS: Final = 10_000.0
MAX_TIMEOUT_MS: Final = 2_147_483_647
MAX_PRIORITY: Final = 2**31
MAX_REF: Final = 128
MAX_NOTE: Final = 256
TRACEPARENT_LENGTH: Final = 55
TRACEPARENT_PATTERN: Final = "(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
"""A `traceparent` of W3C Trace Context: version, trace id, parent id and flags. The version ff and ids of zeros are invalid."""
MAX_CLIENT: Final = 128
MIN_SECRET: Final = 16
MAX_SECRET: Final = 128
MAX_TOKEN: Final = 1024
MAX_NAMESPACE: Final = 128
NAMESPACE_PATTERN: Final = "[A-Za-z0-9_.:-]+"
MAX_ID: Final = 2**53 - 1
MAX_WEIGHT: Final = 2**63 - 1
MAX_DIGITS: Final = 78
"""Maximum number of digits of a weight or target that is sent as a string: enough for 256 bits."""
DECIMAL_PATTERN: Final = "[1-9][0-9]*"
MAX_ROWS: Final = 1_000
MAX_VALUES: Final = 32_768
"""Maximum number of JSON values in a line. A valid command with few and short texts is not checked. Any valid command
has at most 20,015 values."""
MAX_KEYS: Final = 1_000
"""Maximum number of keys in a line of more than `MAX_VALUES` bytes. A command has at most 15 different keys, but may
repeat them. The value of each key is decoded, and a number that is nearly 0 takes 7 µs."""
MAX_DEPTH: Final = 16
"""Maximum nesting of JSON objects and lists. No message needs more than three levels."""
