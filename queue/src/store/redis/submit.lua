-- Records jobs, and adds their entries if it is to; all of them or none.
-- ARGV: now, entries_max tokens_max (empty: no entries are added), then per job: id value place cost
-- times, where the value's state is accepted if entries are added, else queued, and times is `run_at,expires_at` or empty. No id twice, and no more of them than one
-- command takes.
-- Returns {recorded, 0, 0}, or {-1, which bound is hit (1 entries, 2 tokens), retry_after in ms}.
local FIRST, STEP = 4, 5
local now, entries_max, tokens_max = clock(), tonumber(ARGV[2]), tonumber(ARGV[3])

-- The jobs at these places of ARGV: what is recorded under which key, who is in which set, and the
-- entries of each place. Counters, since Lua searches for the length of a table.
local function gather(chosen)
  local all = { strings = {}, queued = {}, timed = {}, places = {}, entries = 0, tokens = 0 }
  local strings, queued, q = all.strings, all.queued, 0
  for n, i in ipairs(chosen) do
    local id, value, place, times = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 4]
    local later = false
    if times ~= '' then
      all.timed[#all.timed + 1] = i
      local run_at = tonumber(times:match('^(%-?%d+),'))
      later = run_at and run_at > now
      if later then value = value:sub(1, 1) .. 's' .. value:sub(3) end
    end
    strings[2 * n - 1], strings[2 * n] = JOB .. id, value
    if not later then
      if not entries_max then queued[q + 1], queued[q + 2], q = '0', id, q + 2 end
      local waiting = all.places[place]
      if not waiting then
        waiting = { count = 0, tokens = 0 }
        all.places[place] = waiting
      end
      waiting.count = waiting.count + 1
      waiting[waiting.count] = i
      waiting.tokens = waiting.tokens + ARGV[i + 3]
      all.entries, all.tokens = all.entries + 1, all.tokens + ARGV[i + 3]
    end
  end
  return all
end

local function over_the_bound(jobs)
  if not entries_max then return nil end
  return excess(jobs.entries, jobs.tokens, entries_max, tokens_max)
end

local chosen = {}
for i = FIRST, #ARGV, STEP do chosen[#chosen + 1] = i end
local jobs = gather(chosen)
-- Nearly always there is room and none is known. Else those that are known do not count.
local new = #chosen > 0 and not over_the_bound(jobs)
  and redis.call('MSETNX', unpack(jobs.strings)) == 1
if not new then
  local fresh = {}
  for _, i in ipairs(chosen) do
    if redis.call('EXISTS', JOB .. ARGV[i]) == 0 then fresh[#fresh + 1] = i end
  end
  if #fresh == 0 then return { 0, 0, 0 } end
  chosen = fresh
  jobs = gather(chosen)
  local which, after = over_the_bound(jobs)
  if which then return { -1, which, after } end
  redis.call('MSET', unpack(jobs.strings))
end

many('ZADD', QUEUED, jobs.queued)
for _, i in ipairs(jobs.timed) do
  local run_at, expires_at = ARGV[i + 4]:match('^(%-?%d*),(%d*)$')
  if expires_at ~= '' then redis.call('ZADD', DEADLINES, expires_at, ARGV[i]) end
  if run_at ~= '' and tonumber(run_at) > now then redis.call('ZADD', SCHEDULED, run_at, ARGV[i]) end
end
if not entries_max then return { #chosen, 0, 0 } end
for place, waiting in pairs(jobs.places) do
  open(place)
  local stream = stream_of(place)
  for _, i in ipairs(waiting) do
    redis.call('XADD', stream, '*', 'v', '2', 'id', ARGV[i], 'cost', ARGV[i + 3])
  end
  count(place, waiting.count, waiting.tokens)
  activate(place)
end
count_accepted(jobs.entries)
if jobs.entries > 0 then ring() end
return { #chosen, 0, 0 }
