-- Which slots hold how much of a chain.  KEYS: prefix.  ARGV: version known, chain, probes at most.
-- Reply: version, registry (false when the known version is current), probes, ends, then depth, set, depth, set ...
-- with the deepest first: the slots of a set hold `depth` blocks at least, unless an earlier set had them. Ends are false,
-- or slot, blocks, slot, blocks ... of all hybrids: what they hold counts only up to there (kv/hit_ends.py).
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

-- Walk back from how deep hybrids hold the chain to where their hits may end, 16 blocks a call. What is not found in
-- ENDS_CALLS is none: a hit is never said to be longer than it is.
local ENDS_CALLS = 128
local function holds(set, slot)
  local at = floor(slot / 8) - string.byte(set)
  return at >= 0 and at < #set - 1 and floor(string.byte(set, at + 2) / 2 ^ (slot % 8)) % 2 == 1
end

local function ends_of(hybrids)
  local found, waiting, searching, row, left = {}, hybrids, {}, 1, ENDS_CALLS
  local depth = out[1] or 0
  while depth > 0 and left > 0 do
    local head, fields = (depth - 1) - (depth - 1) % 16, {}
    for at = head, depth - 1 do fields[#fields + 1] = sub(chain, 8 * at + 1, 8 * at + 6) end
    local cells = call('HMGET', prefix .. 'h' .. sub(chain, 8 * head + 1, 8 * head + 2), unpack(fields))
    left = left - 1
    for blocks = depth, head + 1, -1 do
      while out[row] and out[row] >= blocks do
        local rest = {}
        for _, slot in ipairs(waiting) do
          local list = holds(out[row + 1], slot) and searching or rest
          list[#list + 1] = slot
        end
        waiting, row = rest, row + 2
      end
      local set = cells[blocks - head]
      if set then
        local rest = {}
        for _, slot in ipairs(searching) do
          if holds(set, slot) then found[slot] = blocks else rest[#rest + 1] = slot end
        end
        searching = rest
      end
    end
    depth = #searching > 0 and head or math.min(head, out[row] or 0)
  end
  local flat = {}
  for _, slot in ipairs(hybrids) do
    flat[#flat + 1] = tonumber(slot)
    flat[#flat + 1] = found[slot] or 0
  end
  return flat
end

local hybrids = call('SMEMBERS', prefix .. 'v')
local ends = #hybrids > 0 and ends_of(hybrids)
local version = call('HGET', prefix .. 'm', 'version') or ''
local registry = version ~= ARGV[1] and call('HGETALL', prefix .. 'r')
return { version, registry, probes, ends, unpack(out) }
