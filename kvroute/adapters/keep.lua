-- Store a snapshot of an event stream's owner, and cut the log of deliveries.  KEYS: prefix.
-- ARGV: epoch, replica, token, lease, id of the last delivery in the snapshot, snapshot.  Reply: 'K', or as in changes.lua.
local prefix, call = KEYS[1], redis.call
if call('HGET', prefix .. 'm', 'epoch') ~= ARGV[1] then return 'E' end
if call('HGET', prefix .. 'r', ARGV[2]) ~= ARGV[3] then return 'T' end
local slot = string.match(ARGV[3], '^%d+')
if call('HGET', prefix .. 'o', slot) ~= ARGV[4] then return 'F' end
call('SET', prefix .. 'q' .. slot, ARGV[6])
call('XTRIM', prefix .. 's' .. slot, 'MINID', ARGV[5])
return 'K'
