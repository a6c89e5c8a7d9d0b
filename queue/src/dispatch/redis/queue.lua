-- Shared functions of the scripts of one queue; each script begins with this file.
--
-- KEYS[1] is the queue's prefix `tm:{MODEL:FORMAT}`. Every other key is derived from it and so has the
-- same hash tag: one cluster slot. No key has the prefix itself as its name: see scripts.rs.
--
-- A place is `PRIORITY:TENANT`; its stream is `PREFIX:PLACE`. Fresh entries of a stream were not delivered by
-- its group; parked ones were handed back and are pending with the reserved consumer RETURNED.
--
-- Requeued jobs are in front of their place's line, in order of age, which is that of their ids. A stream
-- only grows at its end, so they wait in a sorted set; when one is delivered, its entry is added to the
-- stream of the place PLACE:again, which has no other fresh entries.
local P = KEYS[1]
local GROUP, RETURNED = 'workers', ':returned'
local PRIORITIES = { 'high', 'normal', 'low' }
local IDS = P .. ':ids'         -- hash: job -> COST:PLACE:ENTRY, @COST:PLACE while delayed, =COST:PLACE in front
local META = P .. ':meta'       -- hash: n and t (waiting entries, tokens), n:PRIORITY, t:PRIORITY, credits, rate,
                                -- missing and missing_t (as n and t: what only the store has),
                                -- refilling (1 until the store has nothing else), run (the server's
                                -- run id when these were set)
local STREAMS = P .. ':streams' -- set: places that have a stream
local COUNTS = P .. ':counts'   -- hash: place -> waiting entries
local COSTS = P .. ':costs'     -- hash: place -> waiting tokens
local PARKED = P .. ':parked'   -- hash: place, or PLACE+ for its second stream -> handed-back entries
local DUE = P .. ':due'         -- sorted set: delayed jobs by due time in ms
local BELLS = P .. ':bells'     -- list: rings for consumers that wait, each for one of them
local RINGS_MAX = 8
local RATE_MS = 30000           -- time constant of the drain rate
local RATE_WARM_MS = 1000       -- shortest time that it is computed over
local UUID = '^[0-9a-f]+%-[0-9a-f]+%-[0-9a-f]+%-[0-9a-f]+%-[0-9a-f]+$'
-- A value in IDS that is too long for the linear encoding of small hashes, so that Redis uses a hash
-- table.
local LONG = ('-'):rep(65)

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Identifies the server's process; empty if the user may not read it.
local function run_id()
  local info = redis.pcall('INFO', 'server')
  return type(info) == 'string' and info:match('run_id:(%x+)') or ''
end

local function stream_of(place) return P .. ':' .. place end

-- The stream for requeued jobs of a place, and the place of either stream.
local function again_of(place) return place .. ':again' end
local function base_of(place) return place:match('^%a+:[^:]*') end

-- The field in PARKED for entries of a place's stream.
local function parked_of(place)
  local base = base_of(place)
  return place == base and place or base .. '+'
end

local function front_of(place) return P .. ':front:' .. place end -- sorted set: jobs, all scores 0

-- The position of a job's entry, as PLACE:ENTRY; nil if it is delayed, in front or unknown.
local function located(id, known)
  local value = known or redis.call('HGET', IDS, id)
  if not value then return nil end
  local cost, place = value:match('^(%d+):(.*)$')
  return place, tonumber(cost)
end

-- Whether a job with this value in IDS is in front of an active place's line. While a place is not active,
-- nothing takes its entries: adding the job again repairs that.
local function in_front(id, value)
  local place = value and value:match('^=%d+:(.*)$')
  if not place or not redis.call('ZSCORE', front_of(place), id) then return false end
  local priority, tenant = place:match('^(%a+):(.*)$')
  return redis.call('ZSCORE', P .. ':active:' .. priority, tenant)
end

local function is_uuid(id)
  local one, two, three, four = id:byte(9), id:byte(14), id:byte(19), id:byte(24)
  return #id == 36 and one == 45 and two == 45 and three == 45 and four == 45 and id:find(UUID)
end

-- Job and cost of a stream's entry, and whether IDS has the job only after its first delivery (version 2
-- is `v2 ID:COST`, added with the job's record in the fast mode); nil if the entry is foreign.
local function decode(fields)
  if not fields then return nil end
  local accepted, id, cost = fields[1] == 'v2', nil, nil
  if accepted then
    id, cost = fields[2]:sub(1, 36), fields[2]:match('^:(%d+)$', 37)
  elseif fields[1] == 'v' and fields[2] == '1' and fields[3] == 'id' and fields[5] == 'cost' then
    id, cost = fields[4], fields[6]
  else
    local named = {}
    for i = 1, #fields, 2 do named[fields[i]] = fields[i + 1] end
    if named.v == '1' then id, cost = named.id, named.cost end
  end
  if not (id and is_uuid(id) and cost and #cost <= 10 and cost:find('^%d+$')) then return nil end
  return id, tonumber(cost), accepted
end

local function is_before(one, other)
  -- If both times have the same number of digits, which is nearly always so, texts have the same
  -- order.
  if #one == #other and one:byte(14) == 45 and other:byte(14) == 45 then return one < other end
  local ms, seq = one:match('^(%d+)%-(%d+)$')
  local other_ms, other_seq = other:match('^(%d+)%-(%d+)$')
  if ms ~= other_ms then return tonumber(ms) < tonumber(other_ms) end
  return tonumber(seq) < tonumber(other_seq)
end

-- Entries of a place from first to last that are pending with the consumer, with their numbers of
-- deliveries.
local function held_by(consumer, place, first, last)
  local held, page, start = {}, 256, first
  while start do
    local pending = redis.pcall('XPENDING', stream_of(place), GROUP, start, last, page, consumer)
    if pending.err then return held end
    for _, item in ipairs(pending) do held[item[1]] = item[4] end
    start = #pending == page and '(' .. pending[page][1] or nil
  end
  return held
end

-- The fence. ARGV holds `id place entry deliveries` for each entry, from ARGV[2] on. Selects the entries
-- that are pending with the consumer by this delivery (an earlier delivery may have been handed back or
-- reclaimed since) and still belong to that job. Returns them as place -> {ids, entries, tokens}, their
-- number, and the positions of the other entries.
local function fenced(consumer)
  local wanted, mine, total, others = {}, {}, 0, {}
  for i = 2, #ARGV, 4 do
    local place, entry = ARGV[i + 1], ARGV[i + 2]
    local at = wanted[place]
    if not at then
      at = { first = entry, last = entry, count = 0, ids = {}, from = {}, seen = {} }
      wanted[place] = at
    end
    if not at.seen[entry] then
      local count = at.count + 1
      at.seen[entry], at.count, at.ids[count], at.from[count] = true, count, ARGV[i], i
      -- The entries are nearly always in order.
      if is_before(at.last, entry) then
        at.last = entry
      elseif is_before(entry, at.first) then
        at.first = entry
      end
    end
  end
  for place, at in pairs(wanted) do
    local held, here = held_by(consumer, place, at.first, at.last), ':' .. place .. ':'
    local known = redis.call('HMGET', IDS, unpack(at.ids))
    local ids, entries, tokens, count = {}, {}, 0, 0
    for n, i in ipairs(at.from) do
      local entry, value = ARGV[i + 2], known[n]
      local cost = value and held[entry] == tonumber(ARGV[i + 3]) and value:match('^(%d+):')
      if cost and value == cost .. here .. entry then
        count = count + 1
        ids[count], entries[count], tokens = at.ids[n], entry, tokens + cost
      else
        others[#others + 1] = (i - 2) / 4
      end
    end
    if count > 0 then mine[place] = { ids = ids, entries = entries, tokens = tokens } end
    total = total + count
  end
  return mine, total, others
end

-- Assigns entries to a consumer as if just delivered, without counting a delivery.
local function claim(place, entries, consumer)
  local words = { 'XCLAIM', stream_of(place), GROUP, consumer, 0 }
  for _, entry in ipairs(entries) do words[#words + 1] = entry end
  words[#words + 1] = 'JUSTID'
  redis.call(unpack(words))
end

-- Adds to the waiting entries (subtracts with negative arguments); returns how many wait at the
-- place.
local function count(place, entries, tokens)
  -- Lua has a negative zero, which Redis does not accept as an integer.
  entries, tokens = entries + 0, tokens + 0
  local priority = place:match('^%a+')
  redis.call('HINCRBY', META, 'n', entries)
  redis.call('HINCRBY', META, 't', tokens)
  if redis.call('HINCRBY', META, 'n:' .. priority, entries) > 0 then
    redis.call('HINCRBY', META, 't:' .. priority, tokens)
  else
    -- Programs of 0.1 do not count these tokens: the empty line is where the count is right again.
    redis.call('HDEL', META, 't:' .. priority)
  end
  redis.call('HINCRBY', COSTS, place, tokens)
  return redis.call('HINCRBY', COUNTS, place, entries)
end

-- Makes a tenant active. Its served tokens start at those of the least served tenant, or at its
-- debt if that is more.
local function activate(place)
  local priority, tenant = place:match('^(%a+):(.*)$')
  local active = P .. ':active:' .. priority
  if redis.call('ZSCORE', active, tenant) then return end
  local least = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')
  local owed = redis.call('ZSCORE', P .. ':owed:' .. priority, tenant)
  redis.call('ZADD', active, math.max(tonumber(least[2] or 0), tonumber(owed or 0)), tenant)
end

-- Makes a tenant inactive. Its served tokens are kept as its debt while they exceed those of the
-- least served active tenant.
local function deactivate(place)
  local priority, tenant = place:match('^(%a+):(.*)$')
  local active, owed = P .. ':active:' .. priority, P .. ':owed:' .. priority
  local entries = tonumber(redis.call('HGET', COUNTS, place) or 0)
  local tokens = tonumber(redis.call('HGET', COSTS, place) or 0)
  if entries ~= 0 or tokens ~= 0 then count(place, -entries, -tokens) end
  redis.call('HDEL', COUNTS, place)
  redis.call('HDEL', COSTS, place)
  redis.call('HDEL', PARKED, place, parked_of(again_of(place)))
  local score = redis.call('ZSCORE', active, tenant)
  redis.call('ZREM', active, tenant)
  local least = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')
  if #least == 0 then
    redis.call('DEL', owed)
  else
    if score then redis.call('ZADD', owed, score, tenant) end
    redis.call('ZREMRANGEBYSCORE', owed, '-inf', least[2])
  end
end

-- Creates the stream and group of a place if they do not exist.
local function open(place)
  if redis.call('SADD', STREAMS, place) == 1 then
    redis.call('HSETNX', IDS, 'long', LONG)
    redis.pcall('XGROUP', 'CREATE', stream_of(place), GROUP, '0', 'MKSTREAM')
  end
end

-- Removes a stream without waiting and pending entries; returns the number of foreign entries in it.
local function close(place)
  if redis.call('HEXISTS', COUNTS, place) == 1 then return 0 end
  local stream = stream_of(place)
  local left = redis.pcall('XLEN', stream)
  if type(left) == 'number' and left > 0 then
    local pending = redis.pcall('XPENDING', stream, GROUP)
    if not pending.err and pending[1] > 0 then return 0 end
  end
  redis.call('DEL', stream)
  redis.call('SREM', STREAMS, place)
  -- An empty queue has no index.
  if redis.call('EXISTS', STREAMS) == 0 then redis.call('HDEL', IDS, 'long') end
  return type(left) == 'number' and left or 0
end

-- Appends an entry; the caller counts it.
local function append(id, place, cost)
  local entry = redis.call('XADD', stream_of(place), '*', 'v', '1', 'id', id, 'cost', cost)
  redis.call('HSET', IDS, id, string.format('%d:%s:%s', cost, place, entry))
end

-- Wakes up to as many waiting consumers as there are entries. Rings that no consumer waits for stay, so their
-- number is limited.
local function ring(entries)
  for _ = redis.call('LLEN', BELLS) + 1, math.min(entries, RINGS_MAX) do
    redis.call('RPUSH', BELLS, '1')
  end
end

-- Tokens acknowledged per ms, or nil while unknown; then the decaying sum and its start.
local function drain_rate(now)
  local kept = redis.call('HMGET', META, 'rate', 'rate_at', 'rate_from')
  if not kept[1] or now - tonumber(kept[2]) > 10 * RATE_MS then return nil, 0, now end
  local sum = tonumber(kept[1]) * math.exp(-math.max(0, now - tonumber(kept[2])) / RATE_MS)
  local from = tonumber(kept[3])
  local warm = RATE_MS * (1 - math.exp(-math.max(RATE_WARM_MS, now - from) / RATE_MS))
  return sum / warm, sum, from
end

-- Counts acknowledged tokens for the drain rate.
local function drained(tokens)
  local now = now_ms()
  local _, sum, from = drain_rate(now)
  redis.call('HSET', META, 'rate', string.format('%.6f', sum + tokens), 'rate_at', now,
    'rate_from', from)
end

-- Time until this many tokens have drained, in ms; an estimate while the rate is unknown.
local function wait_for(tokens)
  local rate = drain_rate(now_ms())
  local after = rate and rate > 0 and tokens / rate or 1000
  return math.floor(math.max(100, math.min(60000, after)))
end

-- Returns the limit that these entries would exceed (1 entries, 2 tokens) and the time to retry in
-- ms; nil if all fit.
local function excess(entries, tokens, entries_max, tokens_max)
  if entries == 0 then return nil end
  local waiting = redis.call('HMGET', META, 'n', 't', 'missing', 'missing_t')
  local entries_left = entries_max - tonumber(waiting[1] or 0) - tonumber(waiting[3] or 0)
  local tokens_left = tokens_max - tonumber(waiting[2] or 0) - tonumber(waiting[4] or 0)
  local which = entries > entries_left and 1 or tokens > tokens_left and 2
  if not which then return nil end
  -- Each excess entry is assumed to cost as much as the mean of these.
  local share = math.min(1, (entries - entries_left) / entries)
  return which, wait_for(which == 2 and tokens - tokens_left or tokens * share)
end

-- Drops a foreign entry.
local function drop(place, entry)
  redis.call('XACK', stream_of(place), GROUP, entry)
  redis.call('XDEL', stream_of(place), entry)
end
