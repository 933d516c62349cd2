-- Write what a replica's events changed, with the place in its stream up to which that goes. Idempotent.
-- KEYS: prefix.  ARGV: epoch, replica, token, lease, state ('' = more of the same batch follows), then tier, cells that
-- went, cells that came; tier, ...  A cell is two bytes of its bucket's name and six of its field (kv/cells.py).
-- Tier ENDS stands for where a hybrid's hits may end (kv/hit_ends.py): buckets 'h..', and the replica's slot in the set 'v'.
-- Reply: 'K'; or 'E' (another epoch), 'T' (another life), 'F' (another owner).
--use bits
local prefix, call, sub = KEYS[1], redis.call, string.sub
--use cells
--use slots
if call('HGET', prefix .. 'm', 'epoch') ~= ARGV[1] then return 'E' end
if call('HGET', prefix .. 'r', ARGV[2]) ~= ARGV[3] then return 'T' end
if call('HGET', prefix .. 'o', slot_of(ARGV[3])) ~= ARGV[4] then return 'F' end

local ENDS = TIERS
local function apply(change, cells, slot, kind)
  local byte, bit = math.floor(slot / 8), 2 ^ (slot % 8)
  local name, fields = nil, {}
  for at = 1, #cells, 8 do
    local bucket = sub(cells, at, at + 1)
    if bucket ~= name or #fields >= 64 then
      if name then update(change, prefix .. kind .. name, fields, byte, bit) end
      name, fields = bucket, {}
    end
    fields[#fields + 1] = sub(cells, at + 2, at + 7)
  end
  if name then update(change, prefix .. kind .. name, fields, byte, bit) end
end

for at = 6, #ARGV, 3 do
  local tier = tonumber(ARGV[at])
  local token, kind = ARGV[3], 'b'
  if tier == ENDS then
    kind = 'h'
    call('SADD', prefix .. 'v', slot_of(token))
  elseif tier > 0 then
    token = call('HGET', prefix .. 'r', tier_name(ARGV[2], tier))
    if not token then
      token = enlist(tier_name(ARGV[2], tier))
      new_version(ARGV[1])
    end
  end
  if token then -- without a free slot the faster tiers still count
    apply(without, ARGV[at + 1], tonumber(slot_of(token)), kind)
    apply(with, ARGV[at + 2], tonumber(slot_of(token)), kind)
  end
end
if ARGV[5] ~= '' then call('HSET', prefix .. 'e', slot_of(ARGV[3]), ARGV[5]) end
return 'K'
