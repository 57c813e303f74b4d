-- Note a copy of the records. While a slot is moved this is refused where not both keys are there, so none is ever in two places.
-- KEYS: meta, copies   ARGV: the records' key
return redis.call('SADD', KEYS[2], ARGV[1])
