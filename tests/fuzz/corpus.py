"""The initial inputs of the fuzzers: the examples of protocol.md, and lines that revealed a defect or are edge cases."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "protocol.md"
STEP = re.compile(r"^[A-Z] (->|<-) (.*(?:\n +.*)*)", re.MULTILINE)

EDGE_CASES = [
    b'{"command":"request","command":"release","payload":{"id":1}}',
    b'{"command":"release","payload":{"id":1},"payload":{"id":2}}',
    b'{"command":"release","payload":{"id":1,"id":2}}',
    b'{"command":"release","payload":{"id":1.0}}',
    b'{"command":"release","payload":{"id":1e0}}',
    b'{"command":"release","payload":{"id":-0}}',
    b'{"command":"release","payload":{"id":9007199254740992}}',
    b'{"command":"release","payload":{"id":1},"x":NaN}',
    b'{"command":"request","payload":{"resources":["exclusive:\\ud800"]}}',
    b'{"command":"request","payload":{"resources":["exclusive:\\ud83d\\ude00"]}}',
    b'{"command":"request","payload":{"resources":["exclusive:\xed\xa0\x80"]}}',
    b'{"command":"request","payload":{"resources":["exclusive:\x01"]}}',
    b'{"command":"request","payload":{"resources":["exclusive:a"],"priority":1e400}}',
    b'{"command":"request","payload":{"resources":["exclusive:a"],"priority":-0.0,"queueTimeout":1e-400}}',
    b'{"command":"request","payload":{"resources":["exclusive:a"],"queueTimeout":2147483647.0000001}}',
    b'{"command":"request","payload":{"anyOf":["shared:a"],"target":9223372036854775807}}',
    b'{"command":"request","payload":{"anyOf":["shared:a"],"target":9223372036854775808}}',
    b'{"command":"request","payload":{"anyOf":["shared:a"],"target":9223372036854775807.0}}',
    b'{"command":"request","payload":{"anyOf":["shared:a","shared:b"],"weights":[0.1,1e300],"target":1e-300}}',
    b'{"command":"request","payload":{"anyOf":["shared:a"],"weights":["007"],"target":"1"}}',
    b'{"command":"request","payload":{"anyOf":["shared:a"],"weights":["9223372036854775808"],"target":"'
    + b"9" * 78
    + b'"}}',
    b'{"command":"request","payload":{"anyOf":["shared:a"],"target":"1\\n"}}',
    b'{"command":"request","payload":{"anyOf":["shared:a"],"target":1.0}}',
    b'{"command":"request","payload":{"anyOf":["shared:a"],"target":"\xd9\xa1"}}',
    *(
        b'{"command":"request","payload":{"%b":["%b"]%b}}' % (field, lock, target)
        for lock in (
            *(b"1/1:a", b"1000000/1000000:a", b"1/1000001:a", b"0/1:a", b"2/1:a", b"007/010:a", b"1/2/3:a", b"+1/2:a"),
            *(b"1/2:", b"1/2:a/**", b"1/2:**", b"exclusive:**", b"shared:/**", b"shared:a/**/**", b"exclusive:a/*"),
            *(b'1/2:a","2/2:a', b'1/2:a","1/2:a', b'1/2:a","1/3:a', b'1/2:a","exclusive:a'),
        )
        for field, target in ((b"resources", b""), (b"anyOf", b',"target":1'))
    ),
    b'{"command":"request","payload":{"resources":["exclusive:a"],"transactionTimout":1}}',
    b'{"command":"request","payload":{"resources":["exclusive:a"],"note":""}}',
    b'{"command":"request","payload":{"resources":["exclusive:a"],"note":"\xc2\x85"}}',
    b'{"command":"request","payload":{"resources":["exclusive:a"],"queueTimeout":2147483647}}',
    b'{"command":"release","payload":{"ref":"r"}}',
    b'{"command":"release","payload":{"id":null,"ref":null}}',
    b'{"command":"release","payload":{"id":1,"ref":"r"}}',
    b'{"command":"extend","payload":{"id":1,"transactionTimeout":1,"ref":"r"}}',
    b'{"command":"ping","payload":{"ref":"r"}}',
    b'{"command":"inspect","payload":{"ref":"r"}}',
    b'{"command":"watch","payload":{"prefix":"a","ref":"r"}}',
    b'{"command":"unwatch","payload":{"prefix":"a","ref":"r"}}',
    b'{"command":"bye"}',
    b'{"command":"bye","payload":{"ref":"r"}}',
    b'{"command":"hello","payload":{"protocol":1,"client":"a/1","quiet":true,"ref":"r"}}',
    b'{"command":"hello","payload":{"protocol":true}}',
    b'{"command":"hello","payload":{"protocol":1.0}}',
    b'{"command":"hello","payload":{"protocol":99999999999999999999}}',
    b'{"command":"hello","payload":{"quiet":1}}',
    b'{"command":"ping","payload":{"namespace":"genie"}}',
    b'{"command":"hello","payload":{"namespace":"a.b:c-d_E"}}',
    b'{"command":"hello","payload":{"namespace":"genie\\n"}}',
    b'{"command":"release","payload":{"id":1,"namespace":"genie"}}',
    b'{"command":"release","payload":{"id":1,"namespace":"\xc3\xa4"}}',
    b'{"command":"watch","payload":{"prefix":"","namespace":"genie"}}',
    b'\xef\xbb\xbf{"command":"ping"}',
    b'\x00{"command":"ping"}',
    b"[" * 20 + b"]" * 20,
    b'{"command":"pong","payload":' + b"[" * 2000 + b"]" * 2000 + b"}",
]


def examples() -> list[bytes]:
    """Return every line in the examples of protocol.md, of clients and of the server, and `EDGE_CASES`."""
    lines = [re.sub(r"\n +", "", text).encode() for _, text in STEP.findall(PAGE.read_text())]
    return list(dict.fromkeys([*lines, *EDGE_CASES]))
