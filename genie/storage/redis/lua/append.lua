-- Append a batch while Redis is out of memory: Redis rejects a transaction then, but runs a script with the flag allow-oom.
-- If the batch was appended before, by a connection that was lost, write the nonce again: WAIT and WAITAOF cover only writes
-- of their own connection.
-- KEYS: log, meta   ARGV: the id of the entry that must be the last one; the id of the new entry; the encoded batch; the
--       id up to which the log is trimmed, which frees memory
-- Returns {the id of the new entry}, as EXEC does; nil, without a change, if another entry is the last one or meta is lost.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local nonce = redis.call('HMGET', KEYS[2], 'nonce')[1]
if not last or not nonce then
  return false
end
if last[1] == ARGV[2] then
  redis.call('HSET', KEYS[2], 'nonce', nonce)
  return {last[1]}
end
if last[1] ~= ARGV[1] then
  return false
end
return {redis.call('XADD', KEYS[1], 'MINID', '~', ARGV[4], ARGV[2], 'batch', ARGV[3])}
