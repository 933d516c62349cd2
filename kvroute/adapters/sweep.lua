-- Clear dead slots' bits in some of the 65,536 buckets; a pass over all of them sets the slots free.
-- KEYS: prefix.  ARGV: epoch, buckets.  Reply: 1 while dead slots remain, else 0.
--use bits
local prefix, call = KEYS[1], redis.call
local meta, dead, dying = prefix .. 'm', prefix .. 'd', prefix .. 'y'
if call('HGET', meta, 'epoch') ~= ARGV[1] then return 0 end
local slots = call('SMEMBERS', dying)
if #slots == 0 then
  if call('EXISTS', dead) == 0 then return 0 end
  call('RENAME', dead, dying)
  call('HSET', meta, 'cursor', 0)
  slots = call('SMEMBERS', dying)
end

-- A bucket as large as many conversations that part in one group is a hash table: HSCAN takes it in pages.
local function page(bucket, inside)
  local reply = call('HSCAN', bucket, inside, 'COUNT', 256)
  local flat = reply[2]
  for i = 1, #flat, 2 do
    local set = flat[i + 1]
    for _, slot in ipairs(slots) do set = without(set, math.floor(slot / 8), 2 ^ (slot % 8)) end
    if not set then
      call('HDEL', bucket, flat[i])
    elseif set ~= flat[i + 1] then
      call('HSET', bucket, flat[i], set)
    end
  end
  return reply[1]
end

local number, inside = tonumber(call('HGET', meta, 'cursor')), call('HGET', meta, 'inside') or '0'
local till = math.min(65536, number + tonumber(ARGV[2]))
while number < till do
  inside = page(prefix .. 'b' .. string.char(math.floor(number / 256), number % 256), inside)
  if inside ~= '0' then break end
  local ends, within = prefix .. 'h' .. string.char(math.floor(number / 256), number % 256), '0'
  repeat within = page(ends, within) until within == '0' -- few: hits may end in few places
  number = number + 1
end
call('HSET', meta, 'cursor', number, 'inside', inside)
if number < 65536 then return 1 end
call('DEL', dying)
return call('EXISTS', dead)
