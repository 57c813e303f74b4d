-- Run one command. KEYS: its key, then keys that must be on the same node   ARGV: the command's name, its other arguments
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
