-- One group commit. All checks come before the first write: a script has no way back.
-- KEYS: meta, records, journal   ARGV: epoch, nonce, counters (the batch's number first), how many entries the journal
--       keeps, how many ids are deleted, then pairs: each of these ids with '', and id and record of each that is written
-- Answers 'ok' (also where this batch was applied before), 'lost' where the store has forgotten batches or everything,
-- 'stale' where later batches were applied already, 'other' where the namespace is another server's.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'counters')
if not meta[1] then
  return 'lost'
end
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then
  return tonumber(meta[1]) < tonumber(ARGV[1]) and 'lost' or 'other'
end
local number, applied = tonumber(string.match(ARGV[3], '^%d+')), tonumber(string.match(meta[3], '^%d+'))
if number < applied then
  return 'stale'
end
if number == applied then
  -- It is there, and perhaps on no replica yet: this makes a WAIT behind it wait for it, on another connection, too.
  redis.call('HSET', KEYS[1], 'counters', meta[3])
  return 'ok'
end
if number > applied + 1 then
  return 'lost'
end
-- unpack() puts its values on a stack of some 8,000 places. So a large batch is several entries of the journal, numbered
-- within a thousand; the last has the counters.
local entry, first, last = 1000 * number, 6, #ARGV
while last - first >= 6000 do
  redis.call('XADD', KEYS[3], string.format('%s-%.0f', ARGV[1], entry), unpack(ARGV, first, first + 5999))
  entry, first = entry + 1, first + 6000
end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], string.format('%s-%.0f', ARGV[1], entry),
  'counters', ARGV[3], unpack(ARGV, first, last))
last = 5 + 2 * tonumber(ARGV[5])
for i = 6, last, 6000 do
  redis.call('HDEL', KEYS[2], unpack(ARGV, i, math.min(i + 5999, last)))
end
for i = last + 1, #ARGV, 6000 do
  redis.call('HSET', KEYS[2], unpack(ARGV, i, math.min(i + 5999, #ARGV)))
end
redis.call('HSET', KEYS[1], 'counters', ARGV[3])
return 'ok'
