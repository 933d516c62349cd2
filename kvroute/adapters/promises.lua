-- The rows of the other live routers.  KEYS: prefix.  ARGV: router.  Reply: list of rows.
local prefix, call, out = KEYS[1], redis.call, {}
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local flat = call('HGETALL', prefix .. 'w')
for i = 1, #flat, 2 do
  if flat[i] ~= ARGV[1] and tonumber(flat[i + 1]) >= now then
    out[#out + 1] = call('HGET', prefix .. 'l', flat[i]) or ''
  end
end
return out
