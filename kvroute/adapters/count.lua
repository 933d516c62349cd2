-- Add up rows of the account, each batch of a router once.  KEYS: prefix.
-- ARGV: epoch known, a random word for a new epoch, router, batch number, then bucket, life in s (0: for ever), field, delta.
-- Reply: epoch; where it is not the known one, nothing was counted.
-- 'e' epoch, 'q' router -> last batch, 'i' set of buckets, 'a<bucket>' field -> sum.
local prefix, call = KEYS[1], redis.call
local epoch = call('GET', prefix .. 'e')
if not epoch then
  epoch = ARGV[2]
  call('SET', prefix .. 'e', epoch)
end
if epoch ~= ARGV[1] or tonumber(call('HGET', prefix .. 'q', ARGV[3]) or '0') >= tonumber(ARGV[4]) then return epoch end
call('HSET', prefix .. 'q', ARGV[3], ARGV[4])
call('EXPIRE', prefix .. 'q', 86400)
local seen = {}
for i = 5, #ARGV, 4 do
  local bucket = prefix .. 'a' .. ARGV[i]
  call('HINCRBY', bucket, ARGV[i + 2], ARGV[i + 3])
  if not seen[bucket] then
    seen[bucket] = true
    call('SADD', prefix .. 'i', ARGV[i])
    if ARGV[i + 1] ~= '0' then call('EXPIRE', bucket, ARGV[i + 1]) end
  end
end
return epoch
