-- Run one command. KEYS: the key of the command, then further keys that must be on the same node
-- ARGV: the name of the command, its arguments after the key
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
