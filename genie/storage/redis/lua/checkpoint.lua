-- Write a part of a checkpoint: records that have changed since the last checkpoint. The last part also moves the checkpoint.
-- The parts of an attempt are written in order, to one state. The field 0 of the state tells which part was written last. So a
-- part is rejected if it arrives late, from a connection that was given up, or if Redis has lost the part before it. Redis
-- must also have the last checkpoint, and the log up to the new one: otherwise the state would lack changes, or be ahead.
-- KEYS: meta, log, state   ARGV: epoch, nonce; the position of the last checkpoint; the numbers of the attempt and of the part; the
--       epoch and the index of the new checkpoint; that checkpoint, encoded ('' if parts follow); how many ids are deleted;
--       these ids; then pairs of an id and its record
-- Returns 'ok'; 'other' if another node leads; 'moved' if Redis has another checkpoint; 'late' if a later part was written, or
-- the previous part was not; 'lost' if Redis was rolled back; 'no state' if Redis has lost the state.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'state', 'checkpoint')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] or meta[3] ~= KEYS[3] then
  return 'other'
end
if string.match(meta[4], '^%S+') ~= ARGV[3] then
  return 'moved'
end
local written = redis.call('HMGET', KEYS[3], '0')[1]
if not written then
  return 'no state'
end
local attempt, part = tonumber(ARGV[4]), tonumber(ARGV[5])
local writer, last_attempt, last_part = string.match(written, '^(%d+) (%d+) (%d+)$')
if writer ~= ARGV[1] then  -- an earlier leader, or none
  last_attempt, last_part = 0, 0
end
last_attempt, last_part = tonumber(last_attempt), tonumber(last_part)
if (part == 1 and attempt <= last_attempt) or (part > 1 and (attempt ~= last_attempt or part ~= last_part + 1)) then
  return 'late'
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if not last then
  return 'lost'
end
local epoch, index = string.match(last[1], '^(%d+)-(%d+)$')
if epoch ~= ARGV[1] or (epoch == ARGV[6] and tonumber(index) < tonumber(ARGV[7])) then
  return 'lost'
end
redis.call('HSET', KEYS[3], '0', ARGV[1] .. ' ' .. attempt .. ' ' .. part)
local first = 10 + tonumber(ARGV[9])
if first > 10 then
  redis.call('HDEL', KEYS[3], unpack(ARGV, 10, first - 1))
end
if #ARGV >= first then
  redis.call('HSET', KEYS[3], unpack(ARGV, first))
end
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[1], 'checkpoint', ARGV[8])
end
return 'ok'
