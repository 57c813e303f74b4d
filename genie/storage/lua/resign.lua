-- Hand the namespace over: nobody leads it, and whoever follows need not wait.
-- KEYS: meta, journal   ARGV: epoch, nonce, the number of the last batch that was sent
-- Answers 'ok', 'other' where the namespace is another server's already, or 'lost' where Redis does not
-- have that: then those who have seen it must come first, and who has seen nothing must wait.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'counters')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then
  return 'other'
end
local number, rest = string.match(meta[3], '^(%d+)(.*)')
if tonumber(number) < tonumber(ARGV[3]) then
  return 'lost'
end
local counters = string.format('%.0f', number + 1) .. rest
redis.call('XADD', KEYS[2], string.format('%s-%.0f', ARGV[1], 1000 * (number + 1)), 'resigned', '', 'counters', counters)
redis.call('HSET', KEYS[1], 'node', '', 'counters', counters)
return 'ok'
