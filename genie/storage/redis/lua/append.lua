-- Append a batch while Redis is out of memory: Redis rejects a transaction then, but runs a script with the flag allow-oom.
-- KEYS: log, meta   ARGV: the id of the entry that must be the last one; the id of the new entry; the encoded batch; the
--       id up to which the log is trimmed, which frees memory
-- Returns {the id of the new entry}, as EXEC does; nil, without a change, if another entry is the last one or meta is lost.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last or last[1] ~= ARGV[1] or redis.call('HLEN', KEYS[2]) == 0 then
  return false
end
return {redis.call('XADD', KEYS[1], 'MINID', '~', ARGV[4], ARGV[2], 'batch', ARGV[3])}
