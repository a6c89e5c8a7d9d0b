-- Records jobs and optionally adds their entries; all or none.
-- ARGV: now, entries_max tokens_max (empty: add no entries), number of jobs with times, then for each of
-- these: its number (from 1), run_at, expires_at (empty: none); then for each place: place, number of jobs,
-- their total cost, and for each job `ID:COST` and its value, in state accepted if entries are added, else
-- queued. Ids and places are unique, and all jobs fit one command.
-- Returns {recorded, 0, 0}, or {-1, exceeded limit (1 entries, 2 tokens), retry_after in ms}.
local now, entries_max, tokens_max = clock(), tonumber(ARGV[2]), tonumber(ARGV[3])
local times, groups, total_jobs = {}, {}, 0

local at = 5
for _ = 1, tonumber(ARGV[4]) do
  times[tonumber(ARGV[at])] = { run_at = tonumber(ARGV[at + 1]), expires_at = tonumber(ARGV[at + 2]) }
  at = at + 3
end
while at <= #ARGV do
  local group = { place = ARGV[at], count = tonumber(ARGV[at + 1]), tokens = tonumber(ARGV[at + 2]),
    before = total_jobs, first = at + 3 }
  groups[#groups + 1] = group
  total_jobs, at = total_jobs + group.count, group.first + 2 * group.count
end

-- Collects the unknown jobs: strings to record, members of sets, and the entries of each place. Keeps
-- counters, since Lua searches for the length of a table.
local function gather(known)
  local all = { strings = {}, count = 0, queued = {}, timed = {}, places = {}, entries = 0,
    tokens = 0 }
  local strings, s, queued, q = all.strings, 0, all.queued, 0
  for _, group in ipairs(groups) do
    local waiting, w, tokens = {}, 0, group.tokens
    for number = 1, group.count do
      local i = group.first + 2 * number - 2
      local entry, value = ARGV[i], ARGV[i + 1]
      local id, left_out = entry:sub(1, 36), known[group.before + number]
      if not left_out then
        local time = times[group.before + number]
        if time then
          all.timed[#all.timed + 1] = { id, time }
          left_out = time.run_at and time.run_at > now
          if left_out then value = value:sub(1, 1) .. 's' .. value:sub(3) end
        end
        strings[s + 1], strings[s + 2], s = JOB .. id, value, s + 2
      end
      if left_out then
        tokens = tokens - entry:sub(38)
      else
        w = w + 1
        waiting[w] = entry
        if not entries_max then queued[q + 1], queued[q + 2], q = '0', id, q + 2 end
      end
    end
    if w > 0 then all.places[group.place] = { entries = waiting, count = w, tokens = tokens } end
    all.entries, all.tokens = all.entries + w, all.tokens + tokens
  end
  all.count = s / 2
  return all
end

local function over_the_bound(jobs)
  if not entries_max then return nil end
  return excess(jobs.entries, jobs.tokens, entries_max, tokens_max)
end

local jobs = gather({})
-- Nearly always there is room and no job is known. Otherwise known jobs do not count.
local new = jobs.count > 0 and not over_the_bound(jobs)
  and redis.call('MSETNX', unpack(jobs.strings)) == 1
if not new then
  local known = {}
  for _, group in ipairs(groups) do
    for number = 1, group.count do
      local id = ARGV[group.first + 2 * number - 2]:sub(1, 36)
      known[group.before + number] = redis.call('EXISTS', JOB .. id) == 1
    end
  end
  jobs = gather(known)
  if jobs.count == 0 then return { 0, 0, 0 } end
  local which, after = over_the_bound(jobs)
  if which then return { -1, which, after } end
  redis.call('MSET', unpack(jobs.strings))
end

many('ZADD', QUEUED, jobs.queued)
for _, timed in ipairs(jobs.timed) do
  local id, time = timed[1], timed[2]
  if time.expires_at then redis.call('ZADD', DEADLINES, time.expires_at, id) end
  if time.run_at and time.run_at > now then redis.call('ZADD', SCHEDULED, time.run_at, id) end
end
if not entries_max then return { jobs.count, 0, 0 } end
for place, waiting in pairs(jobs.places) do
  open(place)
  local stream, call = stream_of(place), redis.call
  for _, entry in ipairs(waiting.entries) do call('XADD', stream, '*', 'v2', entry) end
  count(place, waiting.count, waiting.tokens)
  activate(place)
end
count_accepted(jobs.entries)
if jobs.entries > 0 then ring(jobs.entries) end
return { jobs.count, 0, 0 }
