-- Delivers up to ARGV[2] entries to the consumer ARGV[1], of the priority ARGV[4] alone if it is not empty. ARGV[3]
-- becomes the name of the queue's data if the data has no name yet: a new name shows a consumer that Redis has lost
-- the data.
-- Returns {name, groups created again, foreign entries dropped, ms until the next delayed entry is due
-- or -1, {{id, place:entry, deliveries}, …}}.
--
-- Priorities share by smooth weighted round robin over the waiting entries (see memory.rs). Tenants of one
-- priority are served in order of tokens served so far: a deficit round robin without a quantum, fair to
-- within one entry. A single tenant is read with one command.
local WEIGHTS = { high = 16, normal = 4, low = 1 }
local me, max, only = ARGV[1], tonumber(ARGV[2]), ARGV[4]
local taken, made_again, foreign = {}, 0, 0

-- Takes handed-back entries of a stream in their old order.
local function take_parked(place, want)
  local field = parked_of(place)
  local parked = tonumber(redis.call('HGET', PARKED, field) or 0)
  if want <= 0 or parked <= 0 then return 0, 0 end
  local stream, entries, tokens = stream_of(place), 0, 0
  local pending = redis.pcall('XPENDING', stream, GROUP, '-', '+', want, RETURNED)
  if pending.err then pending = {} end
  for _, item in ipairs(pending) do
    local claimed = redis.call('XCLAIM', stream, GROUP, me, 0, item[1])
    local id, cost = decode(claimed[1] and claimed[1][2])
    if id then
      taken[#taken + 1] = { id, place .. ':' .. item[1], item[4] + 1 }
      entries, tokens = entries + 1, tokens + cost
    else
      drop(place, item[1])
      foreign = foreign + 1
    end
  end
  if #pending < want then
    redis.call('HDEL', PARKED, field)
  else
    redis.call('HINCRBY', PARKED, field, -#pending)
  end
  return entries, tokens
end

-- Makes the place's second stream ready, without fresh entries.
local function open_again(again)
  open(again)
  local groups = redis.pcall('XINFO', 'GROUPS', stream_of(again))
  if groups.err or #groups == 0 then
    redis.call('DEL', stream_of(again))
    redis.call('XGROUP', 'CREATE', stream_of(again), GROUP, '0', 'MKSTREAM')
    made_again = made_again + 1
  end
end

-- Takes requeued jobs, the oldest first.
local function take_front(place, want)
  local ids = redis.call('ZRANGE', front_of(place), 0, want - 1)
  if #ids == 0 then return 0, 0 end
  redis.call('ZREM', front_of(place), unpack(ids))
  local again, entries, tokens, left = again_of(place), 0, 0, 0
  open_again(again)
  for n, value in ipairs(redis.call('HMGET', IDS, unpack(ids))) do
    local cost, at = (value or ''):match('^=(%d+):(.*)$')
    if at == place then
      append(ids[n], again, tonumber(cost))
      tokens, left = tokens + tonumber(cost), left + 1
    end
  end
  while left > 0 do
    local reply = redis.call('XREADGROUP', 'GROUP', GROUP, me, 'COUNT', left, 'STREAMS',
      stream_of(again), '>')
    if not reply then break end
    for _, item in ipairs(reply[1][2]) do
      local id = decode(item[2])
      if id and located(id) == again .. ':' .. item[1] then
        taken[#taken + 1] = { id, again .. ':' .. item[1], 1 }
        entries, left = entries + 1, left - 1
      else
        drop(again, item[1])
        foreign = foreign + 1
      end
    end
  end
  return entries, tokens
end

local function read(place, want)
  local stream = stream_of(place)
  local reply = redis.pcall('XREADGROUP', 'GROUP', GROUP, me, 'COUNT', want, 'STREAMS', stream, '>')
  if reply and reply.err and reply.err:match('NOGROUP') then
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
    made_again = made_again + 1
    -- All entries of the stream are fresh again.
    local known = tonumber(redis.call('HGET', COUNTS, place) or 0)
    count(place, redis.call('XLEN', stream) - known, 0)
    redis.call('HDEL', PARKED, place)
    reply = redis.call('XREADGROUP', 'GROUP', GROUP, me, 'COUNT', want, 'STREAMS', stream, '>')
  end
  if not reply then return {} end
  if reply.err then
    -- Not a stream: delete it.
    redis.call('DEL', stream)
    return {}
  end
  return reply[1][2]
end

-- Takes fresh entries. An entry that another program added is dropped if it is invalid or if its job has
-- another entry; an unknown job is accepted.
local function take_fresh(place, want)
  local entries, tokens = 0, 0
  while entries < want do
    local reply = read(place, want - entries)
    if #reply == 0 then return entries, tokens, true end
    local ids, costs, accepted = {}, {}, {}
    for n, item in ipairs(reply) do
      local id, cost, without_ids = decode(item[2])
      ids[n], costs[n], accepted[n] = id or '', cost, without_ids
    end
    local known, new, words, t = redis.call('HMGET', IDS, unpack(ids)), {}, {}, #taken
    for n, item in ipairs(reply) do
      local id, cost, here = ids[n], costs[n], place .. ':' .. item[1]
      local expected = cost and cost .. ':' .. here
      -- If a reply has two entries of an unknown job, the first is accepted.
      local is_new = cost and not known[n] and not new[id]
      if is_new then
        new[id], words[#words + 1], words[#words + 2] = true, id, expected
        -- A job of the fast mode was counted when its entry was added.
        if not accepted[n] then count(place, 1, cost) end
      end
      if cost and (is_new or known[n] == expected) then
        t = t + 1
        taken[t] = { id, here, 1 }
        entries, tokens = entries + 1, tokens + cost
      else
        drop(place, item[1])
        foreign = foreign + 1
      end
    end
    if #words > 0 then redis.call('HSET', IDS, unpack(words)) end
  end
  return entries, tokens, false
end

-- Takes entries of one tenant; returns their number.
local function take(priority, tenant, want)
  local place = priority .. ':' .. tenant
  local entries, tokens = take_parked(place, want)
  local returned, cost_of_returned = take_parked(again_of(place), want - entries)
  entries, tokens = entries + returned, tokens + cost_of_returned
  local dry = false
  if entries < want then
    local more, cost = take_front(place, want - entries)
    entries, tokens = entries + more, tokens + cost
  end
  if entries < want then
    local more, cost
    more, cost, dry = take_fresh(place, want - entries)
    entries, tokens = entries + more, tokens + cost
  end
  if entries > 0 then
    -- At least one token each, or entries without cost would always be served first.
    redis.call('ZINCRBY', P .. ':active:' .. priority, math.max(tokens, entries), tenant)
  end
  local is_last = entries > 0 and count(place, -entries, -tokens) <= 0
  if dry or (is_last and redis.call('EXISTS', front_of(place)) == 0) then
    deactivate(place)
    foreign = foreign + close(place)
  end
  return entries
end

-- Decides how many waiting entries of each priority are delivered next.
local function plan(want)
  local left, credit, share, total_left = {}, {}, {}, 0
  for _, priority in ipairs(PRIORITIES) do
    local waiting = tonumber(redis.call('HGET', META, 'n:' .. priority) or 0)
    local active = redis.call('EXISTS', P .. ':active:' .. priority) == 1
    -- An active priority is checked even if the count is zero.
    left[priority] = active and math.max(1, waiting) or 0
    credit[priority] = tonumber(redis.call('HGET', META, 'credit:' .. priority) or 0)
    share[priority] = 0
    total_left = total_left + left[priority]
  end
  if total_left == 0 then return share end
  for _ = 1, math.min(want, total_left) do
    local total, best = 0, nil
    for _, priority in ipairs(PRIORITIES) do
      if left[priority] > 0 then
        credit[priority] = credit[priority] + WEIGHTS[priority]
        total = total + WEIGHTS[priority]
        if not best or credit[priority] > credit[best] then best = priority end
      else
        credit[priority] = 0
      end
    end
    if not best then break end
    credit[best] = credit[best] - total
    left[best], share[best] = left[best] - 1, share[best] + 1
  end
  for _, priority in ipairs(PRIORITIES) do
    redis.call('HSET', META, 'credit:' .. priority, credit[priority])
  end
  return share
end

local function serve(priority, want)
  local active = P .. ':active:' .. priority
  while want > 0 do
    local least = redis.call('ZRANGE', active, 0, 1)
    if #least == 0 then return end
    want = want - take(priority, least[1], #least == 1 and want or 1)
  end
end

local name = redis.call('HGET', META, 'name')
if not name then
  name = ARGV[3]
  redis.call('HSET', META, 'name', name)
end
-- More than one round is needed only if counts were wrong because another program deleted entries.
while #taken < max do
  local before, want = #taken, max - #taken
  local share = only == '' and plan(want) or { [only] = want }
  for _, priority in ipairs(PRIORITIES) do serve(priority, share[priority] or 0) end
  if #taken == before then break end
end
local due = redis.call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
local due_in = due[2] and math.max(0, tonumber(due[2]) - now_ms()) or -1
-- A ring wakes one consumer, so that one wakes the next.
if #taken > 0 and tonumber(redis.call('HGET', META, 'n') or 0) > 0 then ring(1) end
return { name, made_again, foreign, due_in, taken }
