-- Delete the snapshots to which `meta` does not point. Does nothing if the caller is not the current leader.
-- KEYS: meta, snapshots, then the snapshot keys   ARGV: epoch, nonce
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'state')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then
  return 'other'
end
for i = 3, #KEYS do
  if KEYS[i] ~= meta[3] then
    redis.call('UNLINK', KEYS[i])
    redis.call('SREM', KEYS[2], KEYS[i])
  end
end
return 'ok'
