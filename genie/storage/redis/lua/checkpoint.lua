-- Write a part of a checkpoint: records that have changed since the last checkpoint. Or move the checkpoint, after all parts.
-- The log must contain the position of the checkpoint: otherwise Redis was rolled back, and the state would be ahead of it.
-- A part of an earlier attempt may arrive late, from a connection that was given up. It has older records, so it is rejected.
-- KEYS: meta, log, state   ARGV: epoch, nonce; the number of the attempt; the epoch and the index of the position; the encoded
--       checkpoint ('' if parts follow); how many ids are deleted; these ids; then pairs of an id and its record
-- Returns 'ok'; 'other' if another node leads; 'late' if a later attempt has begun; 'lost' if Redis was rolled back; 'no state'
-- if Redis has lost the state, which always has the field 0.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'state', 'attempt')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] or meta[3] ~= KEYS[3] then
  return 'other'
end
if tonumber(ARGV[3]) < tonumber(meta[4]) then
  return 'late'
end
if redis.call('HEXISTS', KEYS[3], '0') == 0 then
  return 'no state'
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if not last then
  return 'lost'
end
local epoch, index = string.match(last[1], '^(%d+)-(%d+)$')
if epoch ~= ARGV[1] or (epoch == ARGV[4] and tonumber(index) < tonumber(ARGV[5])) then
  return 'lost'
end
if meta[4] ~= ARGV[3] then  -- only once: the leader watches meta, and its next commit reads meta again
  redis.call('HSET', KEYS[1], 'attempt', ARGV[3])
end
local first = 8 + tonumber(ARGV[7])
if first > 8 then
  redis.call('HDEL', KEYS[3], unpack(ARGV, 8, first - 1))
end
if #ARGV >= first then
  redis.call('HSET', KEYS[3], unpack(ARGV, first))
end
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[1], 'checkpoint', ARGV[6])
end
return 'ok'
