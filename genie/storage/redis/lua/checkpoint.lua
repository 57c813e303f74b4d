-- Write a part of a checkpoint: records that have changed since the last checkpoint. Or move the checkpoint, after all parts.
-- The log must contain the position of the checkpoint: otherwise Redis was rolled back, and the state would be ahead of it.
-- KEYS: meta, log, state   ARGV: epoch, nonce; the epoch and the index of the position; the encoded checkpoint ('' if parts
--       follow); how many ids are deleted; these ids; then pairs of an id and its record
-- Returns 'ok'; 'other' if another node leads; 'lost' if Redis was rolled back.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'state')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] or meta[3] ~= KEYS[3] then
  return 'other'
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if not last then
  return 'lost'
end
local epoch, index = string.match(last[1], '^(%d+)-(%d+)$')
if epoch ~= ARGV[1] or (epoch == ARGV[3] and tonumber(index) < tonumber(ARGV[4])) then
  return 'lost'
end
local first = 7 + tonumber(ARGV[6])
if first > 7 then
  redis.call('HDEL', KEYS[3], unpack(ARGV, 7, first - 1))
end
if #ARGV >= first then
  redis.call('HSET', KEYS[3], unpack(ARGV, first))
end
if ARGV[5] ~= '' then
  redis.call('HSET', KEYS[1], 'checkpoint', ARGV[5])
end
return 'ok'
