-- Take a namespace over, or write it anew: set a new (epoch, nonce) and the key of the records.
-- KEYS: meta, records   ARGV: epoch, nonce, the epoch and nonce that are expected ('' where there is none),
--       clock, next id, next fence (each '' to leave it)
-- Answers 'ok' (also where this very call was carried out before), or 'other' where somebody else was faster.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce')
if meta[1] == ARGV[1] and meta[2] == ARGV[2] then
  return 'ok'
end
if (meta[1] or '') ~= ARGV[3] or (meta[2] or '') ~= ARGV[4] then
  return 'other'
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'nonce', ARGV[2], 'sequence', '0', 'records', KEYS[2])
for i, field in ipairs({'clock', 'next_id', 'next_fence'}) do
  if ARGV[4 + i] ~= '' then
    redis.call('HSET', KEYS[1], field, ARGV[4 + i])
  end
end
return 'ok'
