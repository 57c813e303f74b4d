-- Read the metadata and the end of the log at one moment. The script fails on a node that has only one of the two keys
-- during a slot migration.
-- KEYS: meta, log
-- Returns {the fields and values of meta, the id of the last log entry ('' if there is none)}
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
return {redis.call('HGETALL', KEYS[1]), last and last[1] or ''}
