"""Would this Redis lose locks? Said at the start, with the setting that would keep them."""

from __future__ import annotations

import structlog
from redis import RedisError
from redis.asyncio import Redis

log = structlog.get_logger()


async def warn_if_lossy(client: Redis) -> None:
    """Log a warning for each setting of Redis under which it forgets what it acknowledged."""
    try:
        found = await client.config_get("appendonly", "maxmemory", "maxmemory-policy")
    except RedisError as error:
        log.warning("can't see whether Redis keeps what it is given; it should have appendonly yes", error=str(error))
        return
    if found.get("appendonly") == "no":
        log.warning("Redis forgets the locks when it restarts; set appendonly yes in its configuration")
    policy = found.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        log.warning("Redis may drop locks when its memory is full; set maxmemory-policy noeviction", policy=policy)
