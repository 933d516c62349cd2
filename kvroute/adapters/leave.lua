-- End one life of a replica; a later life, which has another token, is left alone.
-- KEYS: prefix.  ARGV: epoch, replica, token.  Reply: 1 if that life was the current one.
local prefix, call = KEYS[1], redis.call
--use slots
if call('HGET', prefix .. 'm', 'epoch') ~= ARGV[1] or call('HGET', prefix .. 'r', ARGV[2]) ~= ARGV[3] then return 0 end
retire(ARGV[2])
new_version(ARGV[1])
return 1
