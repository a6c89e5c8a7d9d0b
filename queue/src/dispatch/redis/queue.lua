--[[
  Functions that the scripts of one queue share. Each script begins with this file.

  KEYS[1]  prefix of the queue, `tm:{MODEL:FORMAT}`; of a shard above 0, `tm:{MODEL:FORMAT:SHARD}`
  KEYS[2]  the queue's counters, `PREFIX:meta`

  Every key begins with the prefix and so has its hash tag: one cluster slot. No key is the prefix itself: scripts.rs
  says why it is declared.

  A place is `PRIORITY:TENANT`; its stream is `PREFIX:PLACE`. An entry of a stream is fresh until the group delivers
  it, then pending with a consumer. An entry that was handed back is pending with RETURNED_CONSUMER.

  Jobs that are first come before the others of their place, and requeued jobs before fresh entries, each in order of
  age, which is that of their ids. A stream only grows at its end, so they wait in a sorted set: in front. When one is
  delivered, its entry is added to the stream of `PLACE:requeued`, which has no other fresh entries.

  An entry has the fields version, id, cost and expires: its deadline in ms, or 0. Redis keeps the names of fields once
  for each node of a stream, about a hundred entries, so they are words. A location is kept for each job, so its form is
  short. The deadline only decides about turns, so that of an entry which waits elsewhere meanwhile is not kept.
]]
local prefix, meta_key = KEYS[1], KEYS[2]
-- meta_key is a hash:
--   entries, tokens                        what waits
--   entries:PRIORITY, tokens:PRIORITY      the same of one priority
--   credit:PRIORITY                        of the weighted round robin (pull.lua)
--   drained, drained_at, drained_from      decaying sum of acknowledged tokens, its time and its begin in ms
--   missing_entries, missing_tokens        what only the store has
--   refilling, run_id                      1 until the store has nothing else; the server that these were set on
--   name                                   of the queue's data, given by its first pull

-- Hash: job -> its location: `COST:PLACE:ENTRY`, `@COST:PLACE` while it is delayed, `=COST:PLACE` while it is in front.
local locations_key = prefix .. ':locations'
-- Set: places that have a stream.
local streams_key = prefix .. ':streams'
-- Hashes: place -> waiting entries, place -> their tokens.
local waiting_entries_key, waiting_tokens_key = prefix .. ':waiting_entries', prefix .. ':waiting_tokens'
-- Hash: place of a stream -> entries in it that were handed back.
local returned_key = prefix .. ':returned'
-- Sorted set: delayed jobs by due time in ms.
local due_key = prefix .. ':due'
-- List: one element for each consumer that is to be woken.
local wakeups_key = prefix .. ':wakeups'

-- Sorted set: tenants with waiting entries, by tokens that were served so far.
local function active_key(priority) return prefix .. ':active:' .. priority end
-- Sorted set: tenants without waiting entries that were served more than others, by tokens that were served so far.
local function owed_key(priority) return prefix .. ':owed:' .. priority end
-- Sorted set: the jobs in front of a place, by score and then by id.
local function front_key(place) return prefix .. ':front:' .. place end
local function stream_key(place) return prefix .. ':' .. place end

local GROUP, RETURNED_CONSUMER = 'workers', ':returned'
local FIRST_SCORE, REQUEUED_SCORE = -1, 0
local PRIORITIES = { 'high', 'normal', 'low' }
local WAKEUPS_MAX = 8
local RATE_MS = 30000      -- time constant of the drain rate
local RATE_WARM_MS = 1000  -- shortest time that it is computed over
local LIMIT_ENTRIES, LIMIT_TOKENS = 1, 2 -- limits, as scripts return them
local UUID = '^[0-9a-f]+%-[0-9a-f]+%-[0-9a-f]+%-[0-9a-f]+%-[0-9a-f]+$'
-- A location that is too long for the linear encoding of small hashes, so that Redis uses a hash table.
local LONG_LOCATION = ('-'):rep(65)

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Identifies the server's process; empty if the user may not read it.
local function server_run_id()
  local info = redis.pcall('INFO', 'server')
  return type(info) == 'string' and info:match('run_id:(%x+)') or ''
end

-- A list of names and values, as a table.
local function named(list)
  local values = {}
  for i = 1, #list, 2 do values[list[i]] = list[i + 1] end
  return values
end

-- The place of the stream for requeued jobs of a place, and the place of either stream.
local function requeued_place(place) return place .. ':requeued' end
local function base_place(place) return place:match('^%a+:[^:]*') end

local function split_place(place) return place:match('^(%a+):(.*)$') end

-- A job's entry, as PLACE:ENTRY, and its cost; nil if it is delayed, in front or unknown.
local function entry_of(id, known_location)
  local location = known_location or redis.call('HGET', locations_key, id)
  if not location then return nil end
  local cost, entry = location:match('^(%d+):(.*)$')
  return entry, tonumber(cost)
end

-- Whether a job with this location is in front of an active place. While a place is not active, nothing takes its
-- entries: adding the job again repairs that.
local function is_in_front(id, location)
  local place = location and location:match('^=%d+:(.*)$')
  if not place or not redis.call('ZSCORE', front_key(place), id) then return false end
  local priority, tenant = split_place(place)
  return redis.call('ZSCORE', active_key(priority), tenant)
end

local function is_uuid(id)
  local one, two, three, four = id:byte(9), id:byte(14), id:byte(19), id:byte(24)
  return #id == 36 and one == 45 and two == 45 and three == 45 and four == 45 and id:find(UUID)
end

-- The time of a job's id in ms.
local function submitted_ms(id) return tonumber(id:sub(1, 8) .. id:sub(10, 13), 16) end

-- Job, cost and deadline of an entry; nil if the entry is foreign. An entry that another program added may have no
-- deadline.
local function decode_entry(fields)
  if not fields then return nil end
  local id, cost, expires
  if fields[1] == 'version' and fields[2] == '1' and fields[3] == 'id' and fields[5] == 'cost' then
    id, cost, expires = fields[4], fields[6], fields[7] == 'expires' and fields[8]
  else
    local values = named(fields)
    if values.version == '1' then id, cost, expires = values.id, values.cost, values.expires end
  end
  if not (id and is_uuid(id) and cost and #cost <= 10 and cost:find('^%d+$')) then return nil end
  local has_deadline = expires and #expires <= 15 and expires:find('^%d+$')
  return id, tonumber(cost), has_deadline and tonumber(expires) or 0
end

-- Whether an entry is before another one of its stream.
local function is_before(entry, other)
  -- If both times have the same number of digits, which is nearly always so, texts have the same order.
  if #entry == #other and entry:byte(14) == 45 and other:byte(14) == 45 then return entry < other end
  local ms, sequence = entry:match('^(%d+)%-(%d+)$')
  local other_ms, other_sequence = other:match('^(%d+)%-(%d+)$')
  if ms ~= other_ms then return tonumber(ms) < tonumber(other_ms) end
  return tonumber(sequence) < tonumber(other_sequence)
end

-- The last entry of a stream that the group has delivered; nil without the group.
local function last_delivered(stream)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, group in ipairs(groups.err and {} or groups) do
    local values = named(group)
    if values.name == GROUP then return values['last-delivered-id'] end
  end
end

-- Entries of a place from first to last that are pending with the consumer, with their numbers of deliveries.
local function pending_with(consumer, place, first, last)
  local deliveries, page, start = {}, 256, first
  while start do
    local pending = redis.pcall('XPENDING', stream_key(place), GROUP, start, last, page, consumer)
    if pending.err then return deliveries end
    for _, item in ipairs(pending) do deliveries[item[1]] = item[4] end
    start = #pending == page and '(' .. pending[page][1] or nil
  end
  return deliveries
end

-- The fence. ARGV holds `id place entry deliveries` for each entry, from ARGV[2] on. Selects the entries that are
-- pending with the consumer by this delivery (an earlier delivery may have been handed back or reclaimed since) and
-- still belong to that job. Returns them as place -> {ids, entries, tokens}, their number, and the positions of the
-- other entries, from 0.
local function owned_entries(consumer)
  local wanted, owned, total, others = {}, {}, 0, {}
  for i = 2, #ARGV, 4 do
    local id, place, entry = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    local of_place = wanted[place]
    if not of_place then
      of_place = { first = entry, last = entry, count = 0, ids = {}, arguments = {}, seen = {} }
      wanted[place] = of_place
    end
    if not of_place.seen[entry] then
      local count = of_place.count + 1
      of_place.seen[entry], of_place.count = true, count
      of_place.ids[count], of_place.arguments[count] = id, i
      -- The entries are nearly always in order.
      if is_before(of_place.last, entry) then
        of_place.last = entry
      elseif is_before(entry, of_place.first) then
        of_place.first = entry
      end
    end
  end
  for place, of_place in pairs(wanted) do
    local deliveries = pending_with(consumer, place, of_place.first, of_place.last)
    local locations = redis.call('HMGET', locations_key, unpack(of_place.ids))
    local ids, entries, tokens, count, infix = {}, {}, 0, 0, ':' .. place .. ':'
    for n, i in ipairs(of_place.arguments) do
      local entry, location = ARGV[i + 2], locations[n]
      local cost = location and deliveries[entry] == tonumber(ARGV[i + 3]) and location:match('^(%d+):')
      if cost and location == cost .. infix .. entry then
        count = count + 1
        ids[count], entries[count], tokens = of_place.ids[n], entry, tokens + cost
      else
        others[#others + 1] = (i - 2) / 4
      end
    end
    if count > 0 then owned[place] = { ids = ids, entries = entries, tokens = tokens } end
    total = total + count
  end
  return owned, total, others
end

-- Assigns entries to a consumer as if just delivered, without counting a delivery.
local function assign(place, entries, consumer)
  local command = { 'XCLAIM', stream_key(place), GROUP, consumer, 0 }
  for _, entry in ipairs(entries) do command[#command + 1] = entry end
  command[#command + 1] = 'JUSTID'
  redis.call(unpack(command))
end

-- Adds to what waits (subtracts with negative arguments); returns how many entries wait at the place.
local function add_waiting(place, entries, tokens)
  -- Lua has a negative zero, which Redis does not accept as an integer.
  entries, tokens = entries + 0, tokens + 0
  local priority = split_place(place)
  redis.call('HINCRBY', meta_key, 'entries', entries)
  redis.call('HINCRBY', meta_key, 'tokens', tokens)
  redis.call('HINCRBY', meta_key, 'entries:' .. priority, entries)
  redis.call('HINCRBY', meta_key, 'tokens:' .. priority, tokens)
  redis.call('HINCRBY', waiting_tokens_key, place, tokens)
  return redis.call('HINCRBY', waiting_entries_key, place, entries)
end

-- Makes a tenant active. Its served tokens start at those of the least served tenant, or at its debt if that is more.
local function activate(place)
  local priority, tenant = split_place(place)
  local active = active_key(priority)
  if redis.call('ZSCORE', active, tenant) then return end
  local least = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')
  local owed = redis.call('ZSCORE', owed_key(priority), tenant)
  redis.call('ZADD', active, math.max(tonumber(least[2] or 0), tonumber(owed or 0)), tenant)
end

-- Makes a tenant inactive. Its served tokens are kept as its debt while they exceed those of the least served active
-- tenant.
local function deactivate(place)
  local priority, tenant = split_place(place)
  local active, owed = active_key(priority), owed_key(priority)
  local entries = tonumber(redis.call('HGET', waiting_entries_key, place) or 0)
  local tokens = tonumber(redis.call('HGET', waiting_tokens_key, place) or 0)
  if entries ~= 0 or tokens ~= 0 then add_waiting(place, -entries, -tokens) end
  redis.call('HDEL', waiting_entries_key, place)
  redis.call('HDEL', waiting_tokens_key, place)
  redis.call('HDEL', returned_key, place, requeued_place(place))
  local served = redis.call('ZSCORE', active, tenant)
  redis.call('ZREM', active, tenant)
  local least = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')
  if #least == 0 then
    redis.call('DEL', owed)
  else
    if served then redis.call('ZADD', owed, served, tenant) end
    redis.call('ZREMRANGEBYSCORE', owed, '-inf', least[2])
  end
end

-- Creates the stream and group of a place if they do not exist.
local function open_stream(place)
  if redis.call('SADD', streams_key, place) == 1 then
    redis.call('HSETNX', locations_key, 'long', LONG_LOCATION)
    redis.pcall('XGROUP', 'CREATE', stream_key(place), GROUP, '0', 'MKSTREAM')
  end
end

-- Removes a stream without waiting and pending entries; returns the number of foreign entries in it.
local function close_stream(place)
  if redis.call('HEXISTS', waiting_entries_key, place) == 1 then return 0 end
  local stream = stream_key(place)
  local left = redis.pcall('XLEN', stream)
  if type(left) == 'number' and left > 0 then
    local pending = redis.pcall('XPENDING', stream, GROUP)
    if not pending.err and pending[1] > 0 then return 0 end
  end
  redis.call('DEL', stream)
  redis.call('SREM', streams_key, place)
  -- An empty queue has no locations.
  if redis.call('EXISTS', streams_key) == 0 then redis.call('HDEL', locations_key, 'long') end
  return type(left) == 'number' and left or 0
end

-- Appends an entry; the caller counts it.
local function append_entry(id, place, cost, expires)
  local entry =
    redis.call('XADD', stream_key(place), '*', 'version', '1', 'id', id, 'cost', cost, 'expires', expires or '0')
  redis.call('HSET', locations_key, id, string.format('%d:%s:%s', cost, place, entry))
end

-- Drops a foreign entry.
local function drop_entry(place, entry)
  redis.call('XACK', stream_key(place), GROUP, entry)
  redis.call('XDEL', stream_key(place), entry)
end

-- Wakes up to as many waiting consumers as there are entries. Elements that no consumer waits for stay, so their
-- number is limited.
local function wake(entries)
  for _ = redis.call('LLEN', wakeups_key) + 1, math.min(entries, WAKEUPS_MAX) do
    redis.call('RPUSH', wakeups_key, '1')
  end
end

-- Tokens acknowledged per ms, or nil while unknown; then the decaying sum and its begin.
local function drain_rate(now)
  local kept = redis.call('HMGET', meta_key, 'drained', 'drained_at', 'drained_from')
  if not kept[1] or now - tonumber(kept[2]) > 10 * RATE_MS then return nil, 0, now end
  local sum = tonumber(kept[1]) * math.exp(-math.max(0, now - tonumber(kept[2])) / RATE_MS)
  local from = tonumber(kept[3])
  local warm_ms = RATE_MS * (1 - math.exp(-math.max(RATE_WARM_MS, now - from) / RATE_MS))
  return sum / warm_ms, sum, from
end

-- Counts acknowledged tokens for the drain rate.
local function add_drained(tokens)
  local now = now_ms()
  local _, sum, from = drain_rate(now)
  redis.call('HSET', meta_key, 'drained', string.format('%.6f', sum + tokens), 'drained_at', now,
    'drained_from', from)
end

-- Time until this many tokens have drained, in ms; an estimate while the rate is unknown.
local function time_to_drain(tokens)
  local rate = drain_rate(now_ms())
  local ms = rate and rate > 0 and tokens / rate or 1000
  return math.floor(math.max(100, math.min(60000, ms)))
end

-- Returns the limit that these entries would exceed and the time to retry in ms; nil if all fit.
local function exceeded_limit(entries, tokens, entries_max, tokens_max)
  if entries == 0 then return nil end
  local waiting = redis.call('HMGET', meta_key, 'entries', 'tokens', 'missing_entries', 'missing_tokens')
  local entries_left = entries_max - tonumber(waiting[1] or 0) - tonumber(waiting[3] or 0)
  local tokens_left = tokens_max - tonumber(waiting[2] or 0) - tonumber(waiting[4] or 0)
  if entries > entries_left then
    -- Each excess entry is assumed to cost as much as the mean of these.
    local share = math.min(1, (entries - entries_left) / entries)
    return LIMIT_ENTRIES, time_to_drain(tokens * share)
  end
  if tokens > tokens_left then return LIMIT_TOKENS, time_to_drain(tokens - tokens_left) end
  return nil
end
