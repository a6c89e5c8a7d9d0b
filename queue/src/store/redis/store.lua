-- Shared functions of the scripts of the Redis store; each script begins with this file.
--
-- KEYS[1] is the queue's prefix `tm:{MODEL:FORMAT}`, as for the dispatcher; all keys of a queue share a
-- cluster slot. ARGV[1] is the time in ms of a test's clock; empty for Redis's clock.
--
-- A job is one string: a head of HEAD_BYTES, then its place (`PRIORITY:TENANT`, as in the key of its
-- stream), the encoded job, and the encoded outcome if it has one. Its state is in the head, and an
-- unfinished job is a member of the set of its state, so that counting jobs and finding due ones is cheap.
-- An accepted job (state `a`) is queued and in no set: its entry was added together with its record.
local S = KEYS[1]
local JOB = S .. ':job:'           -- string: the job
local SAVED = S .. ':saved:'       -- string: the checkpoint of an unfinished job
local ERRORS = S .. ':errors:'     -- list: encoded errors of attempts, oldest first
local QUEUED = S .. ':queued'      -- sorted set, all scores 0: in order of id
local LEASES = S .. ':leases'      -- sorted set: running jobs, as ID:EPOCH, by the end of their lease
local SCHEDULED = S .. ':scheduled' -- sorted set: by when they are due
local RETRYING = S .. ':retrying'  -- sorted set: by when they are due
local DEADLINES = S .. ':deadlines' -- sorted set: waiting jobs by their deadline
local TOTALS = S .. ':totals'      -- hash: accepted jobs, finished jobs by state, tokens, class
-- version, state, flags, epoch, attempts, attempts_max, expires_at (0: never), finished_at, cost,
-- bytes of place, bytes of job. As `Head` in record.rs.
local HEAD, HEAD_BYTES, VERSION = '>Bc1BI8I4I4I8I8I4I2I4', 45, 1
local HAS_SAVED, HAS_ERRORS = 1, 2 -- flags
local LOST, SUSPECT = 4, 8         -- flags: lost a worker; lost two, or may have broken one
local ALONE, LAPSED = 16, 32       -- flags: the last claim runs alone; it lost its lease
local TAG = 1048576                -- an epoch counts in multiples of it; the rest is its claim's tag
local SETS = { q = QUEUED, r = LEASES, s = SCHEDULED, t = RETRYING }
local NAMES = { c = 'completed', f = 'failed', x = 'cancelled', e = 'expired' }
local PAGE = 1000                  -- arguments of one command; even

local function clock()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Runs a command on a key with any number of arguments.
local function many(command, key, arguments)
  for from = 1, #arguments, PAGE do
    local to = math.min(from + PAGE - 1, #arguments)
    redis.call(command, key, unpack(arguments, from, to))
  end
end

-- The strings of jobs; false for missing ones.
local function values(ids)
  local found = {}
  for from = 1, #ids, PAGE do
    local keys = {}
    for i = from, math.min(from + PAGE - 1, #ids) do keys[#keys + 1] = JOB .. ids[i] end
    for _, value in ipairs(redis.call('MGET', unpack(keys))) do found[#found + 1] = value end
  end
  return found
end

-- The head of a value; nil if it is foreign.
local function parse(value)
  if not value or #value < HEAD_BYTES or value:byte() ~= VERSION then return nil end
  local _, state, flags, epoch, attempts, attempts_max, expires_at, finished_at, cost, place_bytes,
    job_bytes = struct.unpack(HEAD, value)
  -- The table is created at its full size: growing it field by field takes much longer.
  return { state = state, flags = flags, epoch = epoch, attempts = attempts,
    attempts_max = attempts_max, expires_at = expires_at, finished_at = finished_at, cost = cost,
    place_bytes = place_bytes, job_bytes = job_bytes }
end

local function packed(head)
  return struct.pack(HEAD, VERSION, head.state, head.flags, head.epoch, head.attempts,
    head.attempts_max, head.expires_at, head.finished_at, head.cost, head.place_bytes,
    head.job_bytes)
end

-- A number as text: Redis would format it with seventeen digits, which is slow.
local function text(number) return string.format('%d', number) end

local function head_of(id) return parse(redis.call('GETRANGE', JOB .. id, 0, HEAD_BYTES - 1)) end

local function write(id, head) redis.call('SETRANGE', JOB .. id, 0, packed(head)) end

local function has(head, flag) return math.floor(head.flags / flag) % 2 == 1 end

-- Sets or clears a flag of a head, which the caller writes.
local function mark(head, flag, on)
  if has(head, flag) ~= on then head.flags = head.flags + (on and flag or -flag) end
end

-- Raises the epoch of a head, which the caller writes.
local function next_epoch(head, tag)
  head.epoch = (math.floor(head.epoch / TAG) + 1) * TAG + tag
end

-- A claim, as in LEASES. A job is running under this epoch if and only if LEASES has the claim.
local function claim_of(id, epoch) return id .. ':' .. text(epoch) end

local function id_of(claim) return claim:sub(1, 36) end

-- ARGV has a claim at `first` and after every `step` values. Returns the positions (from 1) of the valid
-- claims, then the indices (from 0) of the other claims.
local function held(first, step)
  local claims, mine, lost = {}, {}, {}
  for i = first, #ARGV, step do claims[#claims + 1] = ARGV[i] end
  for from = 1, #claims, PAGE do
    local to = math.min(from + PAGE - 1, #claims)
    for n, score in ipairs(redis.call('ZMSCORE', LEASES, unpack(claims, from, to))) do
      local at = from + n - 2
      if score then mine[#mine + 1] = first + at * step else lost[#lost + 1] = at end
    end
  end
  return mine, lost
end

-- As `held`, after taking back the jobs whose claim lost its lease and was the last one.
local function held_or_lapsed(first, step, now)
  local mine, lost = held(first, step)
  local gone = {}
  for _, at in ipairs(lost) do
    local i = first + at * step
    local id = id_of(ARGV[i])
    local head = head_of(id)
    if head and head.state == 'q' and has(head, LAPSED) and claim_of(id, head.epoch) == ARGV[i] then
      mark(head, LAPSED, false)
      head.state = 'r'
      write(id, head)
      redis.call('ZREM', QUEUED, id)
      if head.expires_at > 0 then redis.call('ZREM', DEADLINES, id) end
      redis.call('ZADD', LEASES, now, ARGV[i])
      mine[#mine + 1] = i
    else
      gone[#gone + 1] = at
    end
  end
  return mine, gone
end

-- Finishes a job: it is kept with its outcome for `retention` ms. The caller removes it from its sets and
-- counts it.
local function over(id, head, value, state, outcome, now, retention)
  head.state, head.finished_at = state, now
  if has(head, HAS_SAVED) then
    redis.call('DEL', SAVED .. id)
    head.flags = head.flags - HAS_SAVED
  end
  if has(head, HAS_ERRORS) then redis.call('PEXPIRE', ERRORS .. id, retention) end
  redis.call('SET', JOB .. id, packed(head) .. value:sub(HEAD_BYTES + 1) .. outcome, 'PX', retention)
end

-- Adds to the number of accepted jobs (subtracts with a negative argument).
local function count_accepted(jobs)
  if jobs ~= 0 then redis.call('HINCRBY', TOTALS, 'accepted', jobs) end
end

-- Removes a job from the set of its state.
local function leave(id, head)
  local set = SETS[head.state]
  if set then
    redis.call('ZREM', set, set == LEASES and claim_of(id, head.epoch) or id)
  elseif head.state == 'a' then
    count_accepted(-1)
  end
end

-- Records an attempt's error; the caller writes the head.
local function note(id, head, error)
  head.attempts = head.attempts + 1
  if not has(head, HAS_ERRORS) then head.flags = head.flags + HAS_ERRORS end
  redis.call('RPUSH', ERRORS .. id, error)
end

-- Counts finished jobs.
local function total(counts)
  for name, count in pairs(counts) do
    if count > 0 then redis.call('HINCRBY', TOTALS, name, count) end
  end
end
