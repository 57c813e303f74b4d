-- One command. KEYS: its key, and others that must be where it is   ARGV: its name, the rest of it
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
