-- All sums of the account.  KEYS: prefix.  Reply: list of {bucket, {field, sum, ...}}.
local prefix, call, out = KEYS[1], redis.call, {}
for _, bucket in ipairs(call('SMEMBERS', prefix .. 'i')) do
  local sums = call('HGETALL', prefix .. 'a' .. bucket)
  if #sums == 0 then
    call('SREM', prefix .. 'i', bucket)
  else
    out[#out + 1] = { bucket, sums }
  end
end
return out
