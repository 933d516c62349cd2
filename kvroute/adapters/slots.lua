-- Slots and whom they stand for: 'r' name -> "slot.generation". A replica's slower tiers have slots of their own, named
-- after it: "replica 1" is what can be had from CPU memory and the GPU, "replica 2" from the slowest tier and those two.
local SLOTS, TIERS = 504, 3 -- a set of slots fits a listpack entry of 64 bytes
local function slot_of(token) return string.match(token, '^%d+') end
local function tier_name(replica, tier) return tier == 0 and replica or replica .. ' ' .. tier end

-- The slots of one life are dead from now on: swept, and used again after that.
local function retire(replica)
  for tier = 0, TIERS - 1 do
    local name = tier_name(replica, tier)
    local token = call('HGET', prefix .. 'r', name)
    if token then
      local slot = slot_of(token)
      call('HDEL', prefix .. 'r', name)
      call('HDEL', prefix .. 'n', name)
      call('HDEL', prefix .. 'o', slot)
      call('HDEL', prefix .. 'e', slot)
      call('SREM', prefix .. 'v', slot)
      call('SADD', prefix .. 'd', slot)
      call('DEL', prefix .. 's' .. slot, prefix .. 'p' .. slot, prefix .. 'q' .. slot)
    end
  end
end

-- Give a name a slot; nil where none is free.
local function enlist(name)
  local used = {}
  for _, token in ipairs(call('HVALS', prefix .. 'r')) do used[slot_of(token)] = true end
  for _, key in ipairs({ 'd', 'y' }) do
    for _, slot in ipairs(call('SMEMBERS', prefix .. key)) do used[slot] = true end
  end
  for slot = 0, SLOTS - 1 do
    if not used[tostring(slot)] then
      local token = slot .. '.' .. call('HINCRBY', prefix .. 'm', 'generation', 1)
      call('HSET', prefix .. 'r', name, token)
      return token
    end
  end
end

local function new_version(epoch)
  local version = epoch .. '.' .. call('HINCRBY', prefix .. 'm', 'changes', 1)
  call('HSET', prefix .. 'm', 'version', version)
  return version
end
