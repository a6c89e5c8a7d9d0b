--[[
  Delivers entries to a consumer.

  ARGV[1]  consumer
  ARGV[2]  most entries to deliver
  ARGV[3]  a name for the queue's data, if it has none yet: a new name shows a consumer that Redis has lost the data
  ARGV[4]  the only priority to deliver; empty for all

  Returns {name of the queue's data, number of groups that were created again, number of foreign entries dropped, ms
  until the next delayed entry is due or -1, {{job, place:entry, number of deliveries}, …}}

  Priorities share by smooth weighted round robin over the waiting entries (see memory.rs). Tenants of one priority are
  served in order of tokens served so far: a deficit round robin without a quantum, fair to within one entry. A single
  tenant is read with one command. Of one tenant come first entries that were handed back, then the jobs in front, then
  fresh entries. The tokens of an entry near its deadline count less in the turns (Entry::turn_tokens).
]]
local consumer, entries_max, new_name, only_priority = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local WEIGHTS = { high = 16, normal = 4, low = 1 }
-- How much of a job's time, at its end, counts as near its deadline, and how many times as large the share is then.
local NEAR_PART, NEAR_SHARE = 4, 4
local taken, groups_created, foreign, now = {}, 0, 0, now_ms()

local function create_group(stream)
  redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  groups_created = groups_created + 1
end

-- Tokens of an entry that count in its tenant's turns.
local function turn_tokens(id, cost, expires)
  if expires == 0 then return cost end
  local near = math.floor((expires - submitted_ms(id)) / NEAR_PART)
  local begin = expires - near
  if near <= 0 or now <= begin then return cost end
  return math.floor(cost / (1 + (NEAR_SHARE - 1) * math.min(1, (now - begin) / near)))
end

-- Takes entries of a stream that were handed back, in their old order; returns their number, tokens and turns' tokens.
local function take_returned(place, wanted)
  local returned = tonumber(redis.call('HGET', returned_key, place) or 0)
  if wanted <= 0 or returned <= 0 then return 0, 0, 0 end
  local stream, entries, tokens, turns = stream_key(place), 0, 0, 0
  local pending = redis.pcall('XPENDING', stream, GROUP, '-', '+', wanted, RETURNED_CONSUMER)
  if pending.err then pending = {} end
  for _, item in ipairs(pending) do
    local entry, deliveries = item[1], item[4]
    local claimed = redis.call('XCLAIM', stream, GROUP, consumer, 0, entry)
    local id, cost, expires = decode_entry(claimed[1] and claimed[1][2])
    if id then
      taken[#taken + 1] = { id, place .. ':' .. entry, deliveries + 1 }
      entries, tokens = entries + 1, tokens + cost
      turns = turns + turn_tokens(id, cost, expires)
    else
      drop_entry(place, entry)
      foreign = foreign + 1
    end
  end
  if #pending < wanted then
    redis.call('HDEL', returned_key, place)
  else
    redis.call('HINCRBY', returned_key, place, -#pending)
  end
  return entries, tokens, turns
end

-- Makes the stream for requeued jobs ready, without fresh entries.
local function open_requeued_stream(place)
  open_stream(place)
  local groups = redis.pcall('XINFO', 'GROUPS', stream_key(place))
  if groups.err or #groups == 0 then
    redis.call('DEL', stream_key(place))
    create_group(stream_key(place))
  end
end

-- Takes jobs in front; returns their number and tokens.
local function take_front(place, wanted)
  local ids = redis.call('ZRANGE', front_key(place), 0, wanted - 1)
  if #ids == 0 then return 0, 0 end
  redis.call('ZREM', front_key(place), unpack(ids))
  local requeued, entries, tokens, left = requeued_place(place), 0, 0, 0
  open_requeued_stream(requeued)
  for n, location in ipairs(redis.call('HMGET', locations_key, unpack(ids))) do
    local cost, front_place = (location or ''):match('^=(%d+):(.*)$')
    if front_place == place then
      append_entry(ids[n], requeued, tonumber(cost))
      tokens, left = tokens + tonumber(cost), left + 1
    end
  end
  while left > 0 do
    local reply = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', left, 'STREAMS',
      stream_key(requeued), '>')
    if not reply then break end
    for _, item in ipairs(reply[1][2]) do
      local entry, id = item[1], decode_entry(item[2])
      if id and entry_of(id) == requeued .. ':' .. entry then
        taken[#taken + 1] = { id, requeued .. ':' .. entry, 1 }
        entries, left = entries + 1, left - 1
      else
        drop_entry(requeued, entry)
        foreign = foreign + 1
      end
    end
  end
  return entries, tokens
end

-- Reads fresh entries of a stream.
local function read(place, wanted)
  local stream = stream_key(place)
  local reply =
    redis.pcall('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', wanted, 'STREAMS', stream, '>')
  if reply and reply.err and reply.err:match('NOGROUP') then
    create_group(stream)
    -- All entries of the stream are fresh again.
    local counted = tonumber(redis.call('HGET', waiting_entries_key, place) or 0)
    add_waiting(place, redis.call('XLEN', stream) - counted, 0)
    redis.call('HDEL', returned_key, place)
    reply = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', wanted, 'STREAMS', stream, '>')
  end
  if not reply then return {} end
  if reply.err then
    -- Not a stream: delete it.
    redis.call('DEL', stream)
    return {}
  end
  return reply[1][2]
end

-- Takes fresh entries; returns their number, tokens and turns' tokens, and whether none are left. An entry that another
-- program added is dropped if it is invalid or if its job has another entry; an unknown job is accepted.
local function take_fresh(place, wanted)
  local entries, tokens, turns = 0, 0, 0
  while entries < wanted do
    local items = read(place, wanted - entries)
    if #items == 0 then return entries, tokens, turns, true end
    local ids, costs, deadlines = {}, {}, {}
    for n, item in ipairs(items) do
      local id, cost, expires = decode_entry(item[2])
      ids[n], costs[n], deadlines[n] = id or '', cost, expires
    end
    local locations = redis.call('HMGET', locations_key, unpack(ids))
    local new, new_locations, taken_count = {}, {}, #taken
    for n, item in ipairs(items) do
      local id, cost, entry = ids[n], costs[n], item[1]
      local place_and_entry = place .. ':' .. entry
      local location = cost and cost .. ':' .. place_and_entry
      -- If a reply has two entries of an unknown job, the first is accepted.
      local is_new = cost and not locations[n] and not new[id]
      if is_new then
        new[id] = true
        new_locations[#new_locations + 1], new_locations[#new_locations + 2] = id, location
        add_waiting(place, 1, cost)
      end
      if cost and (is_new or locations[n] == location) then
        taken_count = taken_count + 1
        taken[taken_count] = { id, place_and_entry, 1 }
        entries, tokens = entries + 1, tokens + cost
        turns = turns + turn_tokens(id, cost, deadlines[n])
      else
        drop_entry(place, entry)
        foreign = foreign + 1
      end
    end
    if #new_locations > 0 then redis.call('HSET', locations_key, unpack(new_locations)) end
  end
  return entries, tokens, turns, false
end

-- Takes entries of one tenant; returns their number.
local function take(priority, tenant, wanted)
  local place = priority .. ':' .. tenant
  local entries, tokens, turns = take_returned(place, wanted)
  local more, more_tokens, more_turns = take_returned(requeued_place(place), wanted - entries)
  entries, tokens, turns = entries + more, tokens + more_tokens, turns + more_turns
  local is_empty = false
  if entries < wanted then
    more, more_tokens = take_front(place, wanted - entries)
    entries, tokens, turns = entries + more, tokens + more_tokens, turns + more_tokens
  end
  if entries < wanted then
    more, more_tokens, more_turns, is_empty = take_fresh(place, wanted - entries)
    entries, tokens, turns = entries + more, tokens + more_tokens, turns + more_turns
  end
  if entries > 0 then
    -- At least one token each, or entries without cost would always be served first.
    redis.call('ZINCRBY', active_key(priority), math.max(turns, entries), tenant)
  end
  local is_last = entries > 0 and add_waiting(place, -entries, -tokens) <= 0
  if is_empty or (is_last and redis.call('EXISTS', front_key(place)) == 0) then
    deactivate(place)
    foreign = foreign + close_stream(place)
  end
  return entries
end

-- Decides how many waiting entries of each priority are delivered next.
local function shares(wanted)
  local left, credit, share, total_left = {}, {}, {}, 0
  for _, priority in ipairs(PRIORITIES) do
    local waiting = tonumber(redis.call('HGET', meta_key, 'entries:' .. priority) or 0)
    local is_active = redis.call('EXISTS', active_key(priority)) == 1
    -- An active priority is checked even if the count is zero.
    left[priority] = is_active and math.max(1, waiting) or 0
    credit[priority] = tonumber(redis.call('HGET', meta_key, 'credit:' .. priority) or 0)
    share[priority] = 0
    total_left = total_left + left[priority]
  end
  if total_left == 0 then return share end
  for _ = 1, math.min(wanted, total_left) do
    local total_weight, best = 0, nil
    for _, priority in ipairs(PRIORITIES) do
      if left[priority] > 0 then
        credit[priority] = credit[priority] + WEIGHTS[priority]
        total_weight = total_weight + WEIGHTS[priority]
        if not best or credit[priority] > credit[best] then best = priority end
      else
        credit[priority] = 0
      end
    end
    if not best then break end
    credit[best] = credit[best] - total_weight
    left[best], share[best] = left[best] - 1, share[best] + 1
  end
  for _, priority in ipairs(PRIORITIES) do
    redis.call('HSET', meta_key, 'credit:' .. priority, credit[priority])
  end
  return share
end

-- Takes entries of a priority, in turns of its tenants.
local function serve(priority, wanted)
  while wanted > 0 do
    local least = redis.call('ZRANGE', active_key(priority), 0, 1)
    if #least == 0 then return end
    wanted = wanted - take(priority, least[1], #least == 1 and wanted or 1)
  end
end

local name = redis.call('HGET', meta_key, 'name')
if not name then
  name = new_name
  redis.call('HSET', meta_key, 'name', name)
end
-- More than one round is needed only if counts were wrong because another program deleted entries.
while #taken < entries_max do
  local before, wanted = #taken, entries_max - #taken
  local share = only_priority == '' and shares(wanted) or { [only_priority] = wanted }
  for _, priority in ipairs(PRIORITIES) do serve(priority, share[priority] or 0) end
  if #taken == before then break end
end
local next_due = redis.call('ZRANGE', due_key, 0, 0, 'WITHSCORES')
local due_in_ms = next_due[2] and math.max(0, tonumber(next_due[2]) - now) or -1
-- One wake-up wakes one consumer, so that one wakes the next.
if #taken > 0 and tonumber(redis.call('HGET', meta_key, 'entries') or 0) > 0 then wake(1) end
return { name, groups_created, foreign, due_in_ms, taken }
