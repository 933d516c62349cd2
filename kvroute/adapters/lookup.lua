-- Which slots hold how much of a chain.  KEYS: prefix.  ARGV: version known, chain, probes at most.
-- Reply: version, registry (false when the known version is current), probes, then depth, set, depth, set ...
-- with the deepest first: the slots of a set hold `depth` blocks at least, unless an earlier set had them.
--
-- Sets only shrink along a chain, so where both ends of a stretch carry the same set, nothing ends in between.
-- Gallop from the root until nobody holds the block; halve the stretches whose ends differ until each is at most
-- 1/64 of the chain; then find the exact ends, deepest first, for as long as the probes last.
local prefix, chain, most = KEYS[1], ARGV[2], tonumber(ARGV[3])
local bucket, length, probes = prefix .. 'b', #ARGV[2] / 8, 0
local sub, call, floor = string.sub, redis.call, math.floor

local function probe(depth)
  probes = probes + 1
  local head = depth - depth % 16
  return call('HGET', bucket .. sub(chain, 8 * head + 1, 8 * head + 2), sub(chain, 8 * depth + 1, 8 * depth + 6)) or ''
end

local lows, sets, count = {}, {}, 0 -- stretch i goes from lows[i], whose set is sets[i], to lows[i + 1]
local function mark(low, set)
  count = count + 1
  lows[count], sets[count] = low, set
end

local function coarse(low, high, set, beyond, step)
  if set ~= beyond and high - low > step then
    local middle = low + floor((high - low) / 2)
    local between = probe(middle)
    coarse(low, middle, set, between, step)
    coarse(middle, high, between, beyond, step)
  else
    mark(low, set)
  end
end

local step = 1
while step * 64 < length do step = step * 2 end
local low, set, width = 0, '', 1
if length > 0 then set = probe(0) end
while set ~= '' do
  local high, beyond = low + width, ''
  if high < length then beyond = probe(high) else high = length end
  coarse(low, high, set, beyond, step)
  low, set, width = high, beyond, width * 2
end
mark(low, '')

local out = {}
local function emit(depth, slots)
  if slots == '' then return end -- above a branch of a corrected chain, which the owner has not cleared yet
  out[#out + 1] = depth
  out[#out + 1] = slots
end

local function exact(low, high, set, beyond)
  if set == beyond then return end
  if high - low == 1 or probes >= most then return emit(low + 1, set) end
  local middle = low + floor((high - low) / 2)
  local between = probe(middle)
  exact(middle, high, between, beyond)
  exact(low, middle, set, between)
end
for i = count - 1, 1, -1 do exact(lows[i], lows[i + 1], sets[i], sets[i + 1]) end

local version = call('HGET', prefix .. 'm', 'version') or ''
local registry = version ~= ARGV[1] and call('HGETALL', prefix .. 'r')
return { version, registry, probes, unpack(out) }
