-- Register a snapshot key. `meta` is named so that this fails on a node that has only one of the keys during a slot
-- migration: the set is never in two places.
-- KEYS: meta, snapshots   ARGV: the snapshot key
return redis.call('SADD', KEYS[2], ARGV[1])
