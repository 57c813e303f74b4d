-- Register a snapshot key, before records are written to it. The unused key `meta` makes the script fail on a node that
-- has only one of the keys during a slot migration. So the set is never on two nodes.
-- KEYS: meta, snapshots   ARGV: the snapshot key
return redis.call('SADD', KEYS[2], ARGV[1])
