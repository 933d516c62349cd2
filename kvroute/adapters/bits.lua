-- A set of slots: the number of its first byte that is not zero, then the bytes of the bit mask from there on.
-- One holder costs 2 bytes, wherever its slot lies. Equal sets have equal strings.
local function with(set, byte, bit)
  if not set then return string.char(byte, bit) end
  local at = byte - string.byte(set)
  local size = #set - 1
  if at < 0 then return string.char(byte, bit) .. string.rep('\0', -at - 1) .. string.sub(set, 2) end
  if at >= size then return set .. string.rep('\0', at - size) .. string.char(bit) end
  local old = string.byte(set, at + 2)
  if old % (2 * bit) >= bit then return set end
  return string.sub(set, 1, at + 1) .. string.char(old + bit) .. string.sub(set, at + 3)
end

-- The same set without a slot; nil when nothing is left.
local function without(set, byte, bit)
  if not set then return nil end
  local at = byte - string.byte(set)
  if at < 0 or at >= #set - 1 then return set end
  local old = string.byte(set, at + 2)
  if old % (2 * bit) < bit then return set end
  local mask = string.sub(set, 2, at + 1) .. string.char(old - bit) .. string.sub(set, at + 3)
  local first = string.find(mask, '[^%z]')
  if not first then return nil end
  local last = string.find(mask, '%z*$') - 1
  return string.char(string.byte(set) + first - 1) .. string.sub(mask, first, last)
end
