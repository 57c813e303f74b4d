-- Take a namespace over, or write it anew: set a new (epoch, nonce) and the key of the records.
-- KEYS: meta, records   ARGV: epoch, nonce, the epoch and nonce that are expected ('' where there is none), counters
--       ('' to go on from those that are there, with the first batch)
-- Answers 'ok' (also where this very call was carried out before), or 'other' where somebody else was faster.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'counters')
if meta[1] == ARGV[1] and meta[2] == ARGV[2] then
  return 'ok'
end
if (meta[1] or '') ~= ARGV[3] or (meta[2] or '') ~= ARGV[4] then
  return 'other'
end
local counters = ARGV[5]
if counters == '' then
  counters = '0' .. string.match(meta[3] or '0 0 1 1', ' .*')
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'nonce', ARGV[2], 'records', KEYS[2], 'counters', counters)
return 'ok'
