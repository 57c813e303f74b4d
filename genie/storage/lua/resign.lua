-- Hand the namespace over: nobody leads it, and whoever follows need not wait.
-- KEYS: meta, journal   ARGV: epoch, nonce
-- Answers 'ok', or 'other' where the namespace is another server's already.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'counters')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then
  return 'other'
end
local number, rest = string.match(meta[3], '^(%d+)(.*)')
local counters = string.format('%.0f', number + 1) .. rest
redis.call('XADD', KEYS[2], string.format('%s-%.0f', ARGV[1], 1000 * (number + 1)), 'resigned', '', 'counters', counters)
redis.call('HSET', KEYS[1], 'node', '', 'counters', counters)
return 'ok'
