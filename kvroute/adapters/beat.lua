-- A router's heartbeat: it is alive, serves these replicas, and looks after its share of them.
-- KEYS: prefix.  ARGV: router, its life in ms (0: it leaves), a random word for a new epoch, then the replicas it serves.
-- Reply: epoch, version, registry {replica, token, ...}, leases of this router {replica, lease, ...}, and the slots of
-- replicas whose events say what they hold {slot, state, ...}.
--
-- Meta hash 'm': epoch, run (of the server), version (changes with the registry), generation, fence, cursor.
-- 'r' replica -> "slot.generation", 'n' replica -> last named (ms), 'w' router -> alive until (ms),
-- 'o' slot -> "fence:router", 'e' slot -> state of its event stream, 'q<slot>' snapshot of that, sets 'd' (dead slots),
-- 'y' (dead slots being swept) and 'v' (slots whose hits end only where buckets 'h..' say), 's<slot>' log, 'p<slot>' snapshot.
local FORGET_MS = 600000 -- replicas nobody names any more
local prefix, call = KEYS[1], redis.call
--use slots
local meta, registry, named, routers, owners = prefix .. 'm', prefix .. 'r', prefix .. 'n', prefix .. 'w', prefix .. 'o'
local router, life = ARGV[1], tonumber(ARGV[2])
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function pairs_of(key)
  local flat, map = call('HGETALL', key), {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end

local tokens = pairs_of(registry)
local changed = false
local function forget(replica)
  retire(replica)
  tokens[replica] = nil
  changed = true
end

-- Another run of the server may have lost writes: everything that it remembers belongs to the past.
local run = string.match(call('INFO', 'server'), 'run_id:(%x+)') or ''
local epoch = call('HGET', meta, 'epoch')
if not epoch or call('HGET', meta, 'run') ~= run then
  for replica in pairs(tokens) do retire(replica) end
  tokens = {}
  epoch = ARGV[3]
  call('HSET', meta, 'epoch', epoch, 'run', run)
  changed = true
end

local alive = pairs_of(routers)
for other, till in pairs(alive) do
  if tonumber(till) < now then
    call('HDEL', routers, other)
    alive[other] = nil
  end
end
if life > 0 then
  call('HSET', routers, router, now + life)
  alive[router] = now + life
else
  call('HDEL', routers, router)
  alive[router] = nil
end

local mine = {}
if life > 0 then
  for i = 4, #ARGV do
    local replica = ARGV[i]
    if not tokens[replica] then
      tokens[replica] = enlist(replica)
      changed = changed or tokens[replica] ~= nil
    end
    if tokens[replica] then
      call('HSET', named, replica, now)
      mine[#mine + 1] = replica
    end
  end
end
for replica, last in pairs(pairs_of(named)) do
  if tokens[replica] and now - tonumber(last) > FORGET_MS then forget(replica) end
end

-- Leases: keep what is ours up to an even share, then take what no live router holds.
local share, population = 0, 0
for name in pairs(tokens) do share = share + (string.find(name, ' ', 1, true) and 0 or 1) end
for _ in pairs(alive) do population = population + 1 end
share = population > 0 and math.ceil(share / population) or 0
local leases = {}
local function keep(replica, lease)
  leases[#leases + 1] = replica
  leases[#leases + 1] = lease
end
local free = {}
for _, replica in ipairs(mine) do
  local slot = slot_of(tokens[replica])
  local lease = call('HGET', owners, slot)
  local owner = lease and string.match(lease, '^%d+:(.*)$')
  if owner == router and #leases / 2 < share then
    keep(replica, lease)
  elseif owner == router then
    call('HDEL', owners, slot)
  elseif not owner or not alive[owner] then
    free[#free + 1] = replica
  end
end
for _, replica in ipairs(free) do
  if #leases / 2 >= share then break end
  local lease = call('HINCRBY', meta, 'fence', 1) .. ':' .. router
  call('HSET', owners, slot_of(tokens[replica]), lease)
  keep(replica, lease)
end

local version = call('HGET', meta, 'version')
if changed or not version then version = new_version(epoch) end
return { epoch, version, call('HGETALL', registry), leases, call('HGETALL', prefix .. 'e') }
