-- Acquire leadership, or switch to a restored snapshot: set a new (epoch, nonce), the node, and the snapshot key.
-- KEYS: meta, records, log   ARGV: epoch, nonce; the expected epoch and nonce ('' where there is none); the expected index
--       of the last batch ('' for any); the node; counters ('' to continue from the stored ones, else those of a restored
--       snapshot); the number of records in that snapshot; its epoch history
-- Returns {'ok', base, history}: the position from which the epoch continues ('' for a restored snapshot), and the epoch
-- history. A repeated call returns the same. Returns 'other' if the stored state is not the expected one, because another
-- node has taken over or the leader has committed; 'lost' if records of the restored snapshot are missing.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'counters', 'base', 'history')
if meta[1] == ARGV[1] and meta[2] == ARGV[2] then
  return {'ok', meta[4], meta[5] or ''}
end
if (meta[1] or '') ~= ARGV[3] or (meta[2] or '') ~= ARGV[4] then
  return {'other', '', ''}
end
local index = string.match(meta[3] or '0', '^%d+')
if ARGV[5] ~= '' and ARGV[5] ~= index then
  return {'other', '', ''}
end
local counters, base, history = ARGV[7], '', ARGV[9]
if counters ~= '' and redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[8]) then
  return {'lost', '', ''}
end
if counters == '' then
  counters = '0' .. string.match(meta[3] or '0 0 1 1', ' .*')
  base = (meta[1] or '0') .. '-' .. index
  history = (meta[5] or '') .. ' ' .. base
  if #history > 1500 then
    history = string.match(string.sub(history, -1200), ' .*')
  end
end
if ARGV[7] ~= '' or not meta[1] then
  redis.call('DEL', KEYS[3])  -- the old entries do not lead to the new state, and may have higher ids than new entries
end
redis.call('XADD', KEYS[3], ARGV[1] .. '-0', 'base', base, 'node', ARGV[6])
-- Keep the records key from being empty: during a slot migration a script fails if only some of its keys exist.
redis.call('HSET', KEYS[2], '0', '')
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'nonce', ARGV[2], 'records', KEYS[2], 'counters', counters,
  'base', base, 'history', history, 'node', ARGV[6])
return {'ok', base, history}
