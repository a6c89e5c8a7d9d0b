-- Records jobs, and adds their entries if it is to; all of them or none.
-- ARGV: now, entries_max tokens_max (empty: no entries are added), then per job: id value place cost
-- times, where the value's state is queued and times is `run_at,expires_at` or empty. No id twice.
-- Returns {recorded, 0, 0}, or {-1, which bound is hit (1 entries, 2 tokens), retry_after in ms}.
local FIRST, STEP = 4, 5
local now, entries_max, tokens_max = clock(), tonumber(ARGV[2]), tonumber(ARGV[3])

local keys, chosen = {}, {}
for i = FIRST, #ARGV, STEP do
  keys[#keys + 1], chosen[#chosen + 1] = JOB .. ARGV[i], i
end
local known = 0
for from = 1, #keys, PAGE do
  local to = math.min(from + PAGE - 1, #keys)
  known = known + redis.call('EXISTS', unpack(keys, from, to))
end
if known > 0 then
  chosen = {}
  for i = FIRST, #ARGV, STEP do
    if redis.call('EXISTS', JOB .. ARGV[i]) == 0 then chosen[#chosen + 1] = i end
  end
end

-- What is recorded under which key, and in which set; entries by place.
local strings, queued, places, entries, tokens = {}, {}, {}, 0, 0
for _, i in ipairs(chosen) do
  local id, value, place, times = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 4]
  local later = false
  if times ~= '' then
    local run_at = tonumber(times:match('^(%-?%d+),'))
    later = run_at and run_at > now and run_at
  end
  if later then
    value = value:sub(1, 1) .. 's' .. value:sub(3)
  else
    queued[#queued + 1], queued[#queued + 2] = 0, id
    if entries_max then
      local waiting = places[place]
      if not waiting then
        waiting = { tokens = 0 }
        places[place] = waiting
      end
      waiting[#waiting + 1] = i
      waiting.tokens = waiting.tokens + tonumber(ARGV[i + 3])
      entries, tokens = entries + 1, tokens + tonumber(ARGV[i + 3])
    end
  end
  strings[#strings + 1], strings[#strings + 2] = JOB .. id, value
end
if entries_max then
  local which, after = excess(entries, tokens, entries_max, tokens_max)
  if which then return { -1, which, after } end
end

for from = 1, #strings, PAGE do
  redis.call('MSET', unpack(strings, from, math.min(from + PAGE - 1, #strings)))
end
many('ZADD', QUEUED, queued)
for _, i in ipairs(chosen) do
  if ARGV[i + 4] ~= '' then
    local run_at, expires_at = ARGV[i + 4]:match('^(%-?%d*),(%d*)$')
    if expires_at ~= '' then redis.call('ZADD', DEADLINES, expires_at, ARGV[i]) end
    if run_at ~= '' and tonumber(run_at) > now then
      redis.call('ZADD', SCHEDULED, run_at, ARGV[i])
    end
  end
end
local located = {}
for place, waiting in pairs(places) do
  open(place)
  local stream = stream_of(place)
  for _, i in ipairs(waiting) do
    local id, cost = ARGV[i], ARGV[i + 3]
    local entry = redis.call('XADD', stream, '*', 'v', '1', 'id', id, 'cost', cost)
    located[#located + 1], located[#located + 2] = id, cost .. ':' .. place .. ':' .. entry
  end
  count(place, #waiting, waiting.tokens)
  activate(place)
end
many('HSET', IDS, located)
if entries > 0 then ring() end
return { #chosen, 0, 0 }
