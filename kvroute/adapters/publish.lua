-- A router's row of the ledger, as a whole.  KEYS: prefix.
-- ARGV: router, life in ms (0: it leaves), a random word for a new epoch, row, then replicas whose reservations the row
-- covers.  Reply: epoch.  A row is lines "\n<replica>\t<requests> <prefill tokens> <kv tokens>\n" put together.
-- 'w' router -> alive until (ms), 'l' router -> row, 'k' "router\0replica" -> reserved tokens, 'e' epoch.
local prefix, call, router = KEYS[1], redis.call, ARGV[1]
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local epoch = call('GET', prefix .. 'e')
if not epoch then
  epoch = ARGV[3]
  call('SET', prefix .. 'e', epoch)
end
local function forget(gone)
  call('HDEL', prefix .. 'w', gone)
  call('HDEL', prefix .. 'l', gone)
  for _, field in ipairs(call('HKEYS', prefix .. 'k')) do
    if string.sub(field, 1, #gone + 1) == gone .. '\0' then call('HDEL', prefix .. 'k', field) end
  end
end
local flat = call('HGETALL', prefix .. 'w')
for i = 1, #flat, 2 do
  if tonumber(flat[i + 1]) < now then forget(flat[i]) end
end
if tonumber(ARGV[2]) == 0 then
  forget(router)
  return epoch
end
call('HSET', prefix .. 'w', router, now + tonumber(ARGV[2]))
call('HSET', prefix .. 'l', router, ARGV[4])
for i = 5, #ARGV do call('HDEL', prefix .. 'k', router .. '\0' .. ARGV[i]) end
return epoch
