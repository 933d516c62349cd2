-- Reserve KV tokens on a replica, if what all live routers promised and reserved there leaves room.  KEYS: prefix.
-- ARGV: router, epoch, replica, tokens, limit, what this router has promised there with them (its row lags).
-- Reply: 1 reserved, 0 no room, -1 this router has to publish first.
local prefix, call, router, replica = KEYS[1], redis.call, ARGV[1], ARGV[3]
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local till = call('HGET', prefix .. 'w', router)
if call('GET', prefix .. 'e') ~= ARGV[2] or not till or tonumber(till) < now then return -1 end
local sum = tonumber(ARGV[6])
local flat = call('HGETALL', prefix .. 'w')
for i = 1, #flat, 2 do
  if flat[i] ~= router and tonumber(flat[i + 1]) >= now then
    local row = call('HGET', prefix .. 'l', flat[i]) or ''
    local _, at = string.find(row, '\n' .. replica .. '\t', 1, true)
    if at then sum = sum + tonumber(string.match(row, '^%d+ %d+ (%d+)', at + 1)) end
    sum = sum + tonumber(call('HGET', prefix .. 'k', flat[i] .. '\0' .. replica) or '0')
  end
end
if sum > tonumber(ARGV[5]) then return 0 end
call('HINCRBY', prefix .. 'k', router .. '\0' .. replica, ARGV[4])
return 1
