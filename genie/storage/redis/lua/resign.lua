-- Resign: clear the node in meta, so that a follower does not wait for the lease to expire.
-- KEYS: meta, log   ARGV: epoch, nonce; the id of the last batch that was sent; the id of the resignation; its batch;
--       the id of this run of Redis ('' if unknown)
-- Returns 'ok'; 'other' if another node leads already; 'lost' if Redis lacks the last batch. After 'lost' a node that has
-- replicated that batch must take over, and all other nodes must wait for the lease.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then
  return 'other'
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if not last or last[1] ~= ARGV[3] then
  return 'lost'
end
redis.call('XADD', KEYS[2], ARGV[4], 'resigned', '', 'batch', ARGV[5])
redis.call('HSET', KEYS[1], 'node', '', 'run_id', ARGV[6])
return 'ok'
