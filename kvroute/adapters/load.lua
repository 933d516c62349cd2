-- What a new owner starts from.  KEYS: prefix.  ARGV: slot.  Reply: "id snapshot" or nothing, the log's last id.
local last = redis.call('XREVRANGE', KEYS[1] .. 's' .. ARGV[1], '+', '-', 'COUNT', 1)
return { redis.call('GET', KEYS[1] .. 'p' .. ARGV[1]), last[1] and last[1][1] or '0-0' }
