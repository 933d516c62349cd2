-- What other routers told.  KEYS: prefix.  ARGV: router, id of the last entry that it knows ('': none, nothing older is
-- asked for), most entries.  Reply: id of the last entry, then texts, the oldest first.
local prefix, call = KEYS[1], redis.call
if ARGV[2] == '' then
  local last = call('XREVRANGE', prefix .. 'n', '+', '-', 'COUNT', 1)
  return { last[1] and last[1][1] or '0-0' }
end
local out = { ARGV[2] }
for _, entry in ipairs(call('XRANGE', prefix .. 'n', '(' .. ARGV[2], '+', 'COUNT', ARGV[3])) do
  out[1] = entry[1]
  if entry[2][2] ~= ARGV[1] then out[#out + 1] = entry[2][4] end
end
return out
