-- Begin a new life of a replica whose lease is ours, empty, and keep the lease: nothing of the old life counts any more.
-- KEYS: prefix.  ARGV: epoch, replica, token, lease, state ('' = what was sent says what it holds, else its events do).
-- Reply: the new token; or 'E' (another epoch), 'T' (another life), 'F' (another owner), 'N' (no slot is free).
local prefix, call = KEYS[1], redis.call
--use slots
local replica = ARGV[2]
if call('HGET', prefix .. 'm', 'epoch') ~= ARGV[1] then return 'E' end
if call('HGET', prefix .. 'r', replica) ~= ARGV[3] then return 'T' end
if call('HGET', prefix .. 'o', slot_of(ARGV[3])) ~= ARGV[4] then return 'F' end
local named = call('HGET', prefix .. 'n', replica)
retire(replica)
local token = enlist(replica)
if token then
  call('HSET', prefix .. 'n', replica, named or 0)
  call('HSET', prefix .. 'o', slot_of(token), ARGV[4])
  if ARGV[5] ~= '' then call('HSET', prefix .. 'e', slot_of(token), ARGV[5]) end
end
new_version(ARGV[1])
return token or 'N'
