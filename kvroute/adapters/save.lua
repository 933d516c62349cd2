-- Store an owner's snapshot and cut the log down to it.  KEYS: prefix.
-- ARGV: epoch, replica, token, lease, id of the last record in the snapshot, snapshot.  Reply: 'K', or as in write.lua.
local prefix, call = KEYS[1], redis.call
if call('HGET', prefix .. 'm', 'epoch') ~= ARGV[1] then return 'E' end
if call('HGET', prefix .. 'r', ARGV[2]) ~= ARGV[3] then return 'T' end
local slot = string.match(ARGV[3], '^%d+')
if call('HGET', prefix .. 'o', slot) ~= ARGV[4] then return 'F' end
call('SET', prefix .. 'p' .. slot, ARGV[5] .. ' ' .. ARGV[6])
call('XTRIM', prefix .. 's' .. slot, 'MINID', ARGV[5])
return 'K'
