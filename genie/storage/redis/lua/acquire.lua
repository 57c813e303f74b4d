-- Acquire leadership: start a new epoch in the log, and describe its leader in meta. Afterwards Redis rejects the appends of
-- all earlier leaders, because the log was changed and its last id has a higher epoch.
-- KEYS: meta, log, state; candidates, only with the id of a candidate
-- ARGV: epoch, nonce; the epoch, the nonce and the id of the last log entry that the candidate has read ('' where there is
--       none); the node; the format version; the position from which the epoch continues ('' for a restored snapshot); the
--       history of the earlier epochs; the checkpoint ('' to keep the stored one); the number of records in a restored
--       snapshot; the id of the candidate ('' if it need not be registered); the id of this run of Redis ('' if unknown)
-- Returns 'ok', also if this epoch was acquired before; 'other' if meta or the log has changed since the candidate read it;
-- 'lost' if records of the restored snapshot are missing.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce')
if meta[1] == ARGV[1] and meta[2] == ARGV[2] then
  return 'ok'
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if (meta[1] or '') ~= ARGV[3] or (meta[2] or '') ~= ARGV[4] or (last and last[1] or '') ~= ARGV[5] then
  return 'other'
end
-- A candidate for an empty namespace was registered when it read that the namespace is empty. If it is not any more, Redis has
-- lost everything since then, and with it perhaps the epoch of a leader that is alive.
if ARGV[12] ~= '' and redis.call('SISMEMBER', KEYS[4], ARGV[12]) == 0 then
  return 'other'
end
if ARGV[10] ~= '' then
  if redis.call('HLEN', KEYS[3]) ~= tonumber(ARGV[11]) then
    return 'lost'
  end
  redis.call('DEL', KEYS[2])  -- the old entries do not lead to the new state, and may have higher ids than new entries
  redis.call('HSET', KEYS[1], 'state', KEYS[3], 'checkpoint', ARGV[10])
  -- Keep the state from being empty: during a slot migration a script fails if only some of its keys exist. And a state
  -- without this field is lost.
  redis.call('HSET', KEYS[3], '0', '')
end
redis.call('XADD', KEYS[2], ARGV[1] .. '-0', 'base', ARGV[8], 'node', ARGV[6])
redis.call('HSET', KEYS[1], 'version', ARGV[7], 'epoch', ARGV[1], 'nonce', ARGV[2], 'node', ARGV[6], 'history', ARGV[9],
  'run_id', ARGV[13])
return 'ok'
