-- One group commit. All checks come before the first write: a script has no way back.
-- KEYS: meta, records   ARGV: epoch, nonce, counters (the batch's sequence number first), how many ids are deleted,
--       these ids, then id and record of each that is written
-- Answers 'ok' (also where this batch was applied before), 'lost' where the store has forgotten batches or everything,
-- 'stale' where later batches were applied already, 'other' where the namespace is another server's.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'counters')
if not meta[1] then
  return 'lost'
end
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then
  return tonumber(meta[1]) < tonumber(ARGV[1]) and 'lost' or 'other'
end
local sequence, applied = tonumber(string.match(ARGV[3], '^%d+')), tonumber(string.match(meta[3], '^%d+'))
if sequence <= applied then
  return sequence == applied and 'ok' or 'stale'
end
if sequence > applied + 1 then
  return 'lost'
end
-- unpack() puts its values on a stack of some 8,000 places
local last = 4 + tonumber(ARGV[4])
for i = 5, last, 4000 do
  redis.call('HDEL', KEYS[2], unpack(ARGV, i, math.min(i + 3999, last)))
end
for i = last + 1, #ARGV, 4000 do
  redis.call('HSET', KEYS[2], unpack(ARGV, i, math.min(i + 3999, #ARGV)))
end
redis.call('HSET', KEYS[1], 'counters', ARGV[3])
return 'ok'
