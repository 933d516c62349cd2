-- Set or clear a slot's bits.  KEYS: prefix.  ARGV: epoch, replica, token, lease ('' from a sender), log ('' for none),
-- records the log may hold, then op ('+' or '-'), skip, hashes; op, skip, hashes; ...
-- Reply: the log's last id; or 'E' (another epoch), 'T' (another life of the replica), 'F' (another owner), 'L' (log full).
-- Hashes begin at a group's first block; the first `skip` of them only name their group.
--use bits
local prefix, call, sub = KEYS[1], redis.call, string.sub
--use cells
if call('HGET', prefix .. 'm', 'epoch') ~= ARGV[1] then return 'E' end
if call('HGET', prefix .. 'r', ARGV[2]) ~= ARGV[3] then return 'T' end
local slot = tonumber(string.match(ARGV[3], '^%d+'))
if ARGV[4] ~= '' and call('HGET', prefix .. 'o', slot) ~= ARGV[4] then return 'F' end
local log = prefix .. 's' .. slot
if ARGV[5] ~= '' and call('XLEN', log) >= tonumber(ARGV[6]) then return 'L' end

local byte, bit = math.floor(slot / 8), 2 ^ (slot % 8)
-- Where events say what a replica holds, senders do not: their record is all that is kept.
local first = ARGV[4] == '' and call('HEXISTS', prefix .. 'e', slot) == 1 and #ARGV + 1 or 7
for at = first, #ARGV, 3 do
  local change, skip, hashes = ARGV[at] == '+' and with or without, tonumber(ARGV[at + 1]), ARGV[at + 2]
  local blocks = #hashes / 8
  for head = 0, blocks - 1, 16 do
    local fields = {}
    for depth = math.max(head, skip), math.min(head + 16, blocks) - 1 do
      fields[#fields + 1] = sub(hashes, 8 * depth + 1, 8 * depth + 6)
    end
    if #fields > 0 then update(change, prefix .. 'b' .. sub(hashes, 8 * head + 1, 8 * head + 2), fields, byte, bit) end
  end
end
if ARGV[5] ~= '' then return call('XADD', log, '*', 'd', ARGV[5]) end
if ARGV[4] == '' then return '' end
local last = call('XREVRANGE', log, '+', '-', 'COUNT', 1)
return last[1] and last[1][1] or '0-0'
