-- What a router tells all others once.  KEYS: prefix.  ARGV: router, text, most entries kept, life in ms.  Reply: id.
-- 'n' stream of (r: router, t: text); the oldest go first.
local prefix, call = KEYS[1], redis.call
local id = call('XADD', prefix .. 'n', 'MAXLEN', '~', ARGV[3], '*', 'r', ARGV[1], 't', ARGV[2])
call('PEXPIRE', prefix .. 'n', ARGV[4])
return id
