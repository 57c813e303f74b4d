"""One batch as the one command that commits it."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files

from genie.core import ENDED, Request
from genie.storage.base import Batch
from genie.storage.journal import Kept
from genie.storage.link import Link, Refused, bulk, pack
from genie.storage.master import runnable
from genie.storage.namespace import Namespace, counters
from genie.storage.records import encode

WAIT_MS = (1_000,) * 3
"""How long Redis waits for its replicas before it says how many have confirmed a commit, as often as it is asked."""
WAITAOF_MS = (10, 20, 40, 80, 160, 320, 640, 1_000, 1_000)
"""The same for disks. A replica says what is on its disk when it is asked, and then once a second: when it is asked for
the first time that commit is not there yet."""

_COMMIT = files("genie.storage").joinpath("lua/commit.lua").read_bytes()


def _sha(script: bytes) -> bytes:
    return sha1(script).hexdigest().encode()  # noqa: S324 - Redis names scripts so


async def load_scripts(link: Link) -> bytes:
    """Load the script of a commit, and the one that is also run where Redis is full; returns that one's name.

    Empty where this Redis has no such thing: it is older than 7.
    """
    await link.call("SCRIPT", "LOAD", _COMMIT)
    roomy = runnable(_COMMIT, link)
    if roomy is _COMMIT:
        return b""
    await link.call("SCRIPT", "LOAD", roomy)
    return _sha(roomy)


class Packer:
    """Numbers the batches of one tenure, from one on, and packs them."""

    def __init__(self, namespace: Namespace) -> None:
        tenure = namespace.tenure
        keys = (namespace.meta, tenure.records, namespace.journal)
        head = ("EVALSHA", _SHA, len(keys), *keys, tenure.epoch, tenure.nonce)
        self._head, self._head_length = b"".join(map(bulk, head)), len(head)
        self._kept = Kept()
        self.number = 0

    def pack(self, batch: Batch) -> bytes:
        """The next batch."""
        self.number += 1
        deleted: list[bytes] = []
        written: list[bytes] = []
        for id_, change in batch.changes.items():
            key = b"%d" % id_
            if change is None or (isinstance(change, Request) and change.state is ENDED):
                deleted.append(b"$%d\r\n%b\r\n$0\r\n\r\n" % (len(key), key))
            else:
                record = encode(change)
                written.append(b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(record), record))
        changes = b"".join(deleted) + b"".join(written)
        numbers, gone = counters(self.number, batch.clock_ms, batch.next_id, batch.next_fence), b"%d" % len(deleted)
        kept = b"%d" % self._kept.add(len(changes) + len(numbers), len(batch.changes))
        return b"*%d\r\n%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n%b" % (
            self._head_length + 3 + 2 * len(batch.changes),
            self._head,
            len(numbers),
            numbers,
            len(kept),
            kept,
            len(gone),
            gone,
            changes,
        )


_SHA = _sha(_COMMIT)


def with_script(packed: bytes, name: bytes) -> bytes:
    """A packed batch, for another script that does the same."""
    return packed.replace(_SHA, name, 1)


class Confirmation:
    """What a commit must be followed by before it counts as stored: nothing, WAIT or WAITAOF, on the same connection.

    `replicas` must have it; with `fsync` on their disks, and on that of the master.
    """

    def __init__(self, replicas: int, *, fsync: bool) -> None:
        self._wanted = [1, replicas] if fsync else [replicas]
        name, timeouts_ms = ("WAITAOF", WAITAOF_MS) if fsync else ("WAIT", WAIT_MS)
        self.again = [pack([name, *self._wanted, timeout_ms]) for timeout_ms in timeouts_ms]
        """What is sent behind a commit, and then instead of it for as long as something is missing."""
        wanted = any(self._wanted)
        self.command = self.again[0] if wanted else b""
        self.replies = 2 if wanted else 1

    def missing(self, reply: object) -> str:
        """What is still missing by Redis's answer; nothing where it is all there."""
        if isinstance(reply, Refused):
            return str(reply)
        confirmed = reply if isinstance(reply, list) else [reply]
        if all(count >= wanted for count, wanted in zip(confirmed, self._wanted, strict=True)):
            return ""
        disk = [] if len(confirmed) == 1 or confirmed[0] else ["not on the disk of the master"]
        replicas = [f"confirmed by {confirmed[-1]} of {self._wanted[-1]} replicas"] if self._wanted[-1] else []
        return ", and ".join(disk + replicas)
