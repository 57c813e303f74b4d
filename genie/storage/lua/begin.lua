-- Take a namespace over, or write it anew: set a new (epoch, nonce), the node that leads, and the key of the records.
-- KEYS: meta, records, journal   ARGV: epoch, nonce, the epoch and nonce that are expected ('' where there is none), the
--       number of the last batch that is expected ('' for any), the node, counters ('' to go on from those that are there,
--       with the first batch), how many records were written for it, and by which epochs what was written has come about
--       (both only with counters)
-- Answers 'ok' (also where this very call was carried out before), where it goes on from, as epoch-number ('' where it is
-- written anew), and all of its history; 'other' where somebody else was faster, or the leader is alive; 'lost' where not all of the records are
-- there any more.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'counters', 'base', 'history')
if meta[1] == ARGV[1] and meta[2] == ARGV[2] then
  return {'ok', meta[4], meta[5] or ''}
end
if (meta[1] or '') ~= ARGV[3] or (meta[2] or '') ~= ARGV[4] then
  return {'other', '', ''}
end
local number = string.match(meta[3] or '0', '^%d+')
if ARGV[5] ~= '' and ARGV[5] ~= number then
  return {'other', '', ''}
end
local counters, base, history = ARGV[7], '', ARGV[9]
if counters ~= '' and redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[8]) then
  return {'lost', '', ''}
end
if counters == '' then
  counters = '0' .. string.match(meta[3] or '0 0 1 1', ' .*')
  base = (meta[1] or '0') .. '-' .. number
  history = (meta[5] or '') .. ' ' .. base
  if #history > 1500 then
    history = string.match(string.sub(history, -1200), ' .*')
  end
end
if ARGV[7] ~= '' or not meta[1] then
  redis.call('DEL', KEYS[3])  -- whatever is left there leads nowhere, and its ids may be higher than those that come
end
redis.call('XADD', KEYS[3], ARGV[1] .. '-0', 'base', base, 'node', ARGV[6])
-- No key is ever missing, however few locks there are: a slot of a cluster that is being moved serves what has all its keys.
redis.call('HSET', KEYS[2], '0', '')
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'nonce', ARGV[2], 'records', KEYS[2], 'counters', counters,
  'base', base, 'history', history, 'node', ARGV[6])
return {'ok', base, history}
