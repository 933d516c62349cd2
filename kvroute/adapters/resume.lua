-- What a new owner of an event stream begins with.  KEYS: prefix.  ARGV: slot.
-- Reply: state of the last write (false: the replica's events were not written), snapshot or false, the log's last id.
local prefix, call = KEYS[1], redis.call
local last = call('XREVRANGE', prefix .. 's' .. ARGV[1], '+', '-', 'COUNT', 1)
return {
  call('HGET', prefix .. 'e', ARGV[1]),
  call('GET', prefix .. 'q' .. ARGV[1]),
  last[1] and last[1][1] or '0-0',
}
