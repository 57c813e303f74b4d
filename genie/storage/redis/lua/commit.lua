-- Apply one batch. All checks come before the first write: a script cannot roll back.
-- KEYS: meta, records, log   ARGV: epoch, nonce; counters (the batch's index first); how many log entries to keep; how many
--       ids are deleted; then pairs: each deleted id with '', each written id with its record
-- Returns 'ok', also if this batch was applied before; 'lost' if Redis has lost earlier batches or everything; 'stale' if
-- later batches were applied already; 'other' if another node leads.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'counters')
if not meta[1] then
  return 'lost'
end
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then
  return tonumber(meta[1]) < tonumber(ARGV[1]) and 'lost' or 'other'
end
local index, applied = tonumber(string.match(ARGV[3], '^%d+')), tonumber(string.match(meta[3], '^%d+'))
if index < applied then
  return 'stale'
end
if index == applied then
  -- The batch was applied before, but replicas may lack it. WAIT only covers writes of its own connection, so write again.
  redis.call('HSET', KEYS[1], 'counters', meta[3])
  return 'ok'
end
if index > applied + 1 then
  return 'lost'
end
-- unpack() is limited by Lua's stack of about 8,000 values. So a large batch becomes several log entries, at most 1,000.
-- The last entry contains the counters.
local entry, first, last = 1000 * index, 6, #ARGV
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
