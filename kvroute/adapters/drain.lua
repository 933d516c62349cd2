-- What was logged since the owner last looked.  KEYS: prefix.  ARGV: epoch, records a slot at most, then slot, last id, ...
-- Reply: 'E' for another epoch, else a list for each slot of {id, {field, record}}.
local prefix, call, out = KEYS[1], redis.call, {}
if call('HGET', prefix .. 'm', 'epoch') ~= ARGV[1] then return 'E' end
for i = 3, #ARGV, 2 do
  out[#out + 1] = call('XRANGE', prefix .. 's' .. ARGV[i], '(' .. ARGV[i + 1], '+', 'COUNT', ARGV[2])
end
return out
