-- End one life of a replica; a later life, which has another token, is left alone.
-- KEYS: prefix.  ARGV: epoch, replica, token.  Reply: 1 if that life was the current one.
local prefix, call = KEYS[1], redis.call
local meta = prefix .. 'm'
if call('HGET', meta, 'epoch') ~= ARGV[1] or call('HGET', prefix .. 'r', ARGV[2]) ~= ARGV[3] then return 0 end
local slot = string.match(ARGV[3], '^%d+')
call('HDEL', prefix .. 'r', ARGV[2])
call('HDEL', prefix .. 'n', ARGV[2])
call('HDEL', prefix .. 'o', slot)
call('SADD', prefix .. 'd', slot)
call('DEL', prefix .. 's' .. slot, prefix .. 'p' .. slot)
call('HSET', meta, 'version', ARGV[1] .. '.' .. call('HINCRBY', meta, 'changes', 1))
return 1
