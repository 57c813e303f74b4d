-- Resign: clear the node in `meta`, so that a follower does not wait for the lease to expire.
-- KEYS: meta, log   ARGV: epoch, nonce, the index of the last batch that was sent
-- Returns 'ok'; 'other' if another node leads already; 'lost' if Redis lacks the last batch. After 'lost' a node that has
-- replicated that batch must take over, and all other nodes must wait for the lease.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'counters')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then
  return 'other'
end
local index, rest = string.match(meta[3], '^(%d+)(.*)')
if tonumber(index) < tonumber(ARGV[3]) then
  return 'lost'
end
local counters = string.format('%.0f', index + 1) .. rest
redis.call('XADD', KEYS[2], string.format('%s-%.0f', ARGV[1], 1000 * (index + 1)), 'resigned', '', 'counters', counters)
redis.call('HSET', KEYS[1], 'node', '', 'counters', counters)
return 'ok'
