"""Would this Redis lose locks? Said at the start, with the setting that would keep them."""

from __future__ import annotations

import structlog

from genie.storage.link import Refused
from genie.storage.master import Master

log = structlog.get_logger()


async def warn_if_lossy(master: Master) -> None:
    """Log a warning for each setting of Redis under which it forgets what it acknowledged."""
    found: dict[bytes, bytes] = {}
    try:
        for setting in ("appendonly", "maxmemory-policy"):  # before Redis 7 only one can be asked for at a time
            reply = await master.call("CONFIG", "GET", setting)
            found |= zip(reply[::2], reply[1::2], strict=True)
    except Refused as error:
        log.warning("can't see whether Redis keeps what it is given; it should have appendonly yes", error=str(error))
        return
    if found.get(b"appendonly") == b"no":
        log.warning("Redis forgets the locks when it restarts; set appendonly yes in its configuration")
    policy = found.get(b"maxmemory-policy", b"noeviction").decode()
    if policy != "noeviction":
        log.warning("Redis may drop locks when its memory is full; set maxmemory-policy noeviction", policy=policy)
