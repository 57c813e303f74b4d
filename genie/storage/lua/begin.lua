-- Take a namespace over, or write it anew: set a new (epoch, nonce), the node that leads, and the key of the records.
-- KEYS: meta, records, journal   ARGV: epoch, nonce, the epoch and nonce that are expected ('' where there is none), the
--       number of the last batch that is expected ('' for any), the node, counters ('' to go on from those that are there,
--       with the first batch), how many records were written for it (only with counters)
-- Answers 'ok' (also where this very call was carried out before) and where it goes on from, as epoch-number ('' where it
-- is written anew); 'other' where somebody else was faster, or the leader is alive; 'lost' where not all of the records are
-- there any more.
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'counters', 'base')
if meta[1] == ARGV[1] and meta[2] == ARGV[2] then
  return {'ok', meta[4]}
end
if (meta[1] or '') ~= ARGV[3] or (meta[2] or '') ~= ARGV[4] then
  return {'other', ''}
end
local number = string.match(meta[3] or '0', '^%d+')
if ARGV[5] ~= '' and ARGV[5] ~= number then
  return {'other', ''}
end
local counters, base = ARGV[7], ''
if counters ~= '' and redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[8]) then
  return {'lost', ''}
end
if counters == '' then
  counters = '0' .. string.match(meta[3] or '0 0 1 1', ' .*')
  base = (meta[1] or '0') .. '-' .. number
else
  redis.call('DEL', KEYS[3])
end
redis.call('XADD', KEYS[3], ARGV[1] .. '-0', 'base', base, 'node', ARGV[6])
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'nonce', ARGV[2], 'records', KEYS[2], 'counters', counters,
  'base', base, 'node', ARGV[6])
return {'ok', base}
