-- What the scripts of the Redis store share.
--
-- KEYS[1] is the queue's prefix `tm:{MODEL:FORMAT}`, as for the dispatcher; all keys of a queue share
-- a slot. ARGV[1] is the time in ms of a test's clock; empty for Redis's own.
--
-- A job is one string: a head of HEAD_BYTES, then its place (`PRIORITY:TENANT`, as in the name of its
-- stream), the encoded job, and the encoded outcome once it has one. Where it is in its life is in
-- the head, and in which of the sets it is a member: so counting is cheap, and finding what is due.
local S = KEYS[1]
local JOB = S .. ':job:'           -- string: the job
local SAVED = S .. ':saved:'       -- string: the checkpoint of an attempt that runs or will go on
local ERRORS = S .. ':errors:'     -- list: encoded errors of attempts, oldest first
local QUEUED = S .. ':queued'      -- sorted set, all scores 0: in order of id
local LEASES = S .. ':leases'      -- sorted set: running jobs by the end of their lease
local SCHEDULED = S .. ':scheduled' -- sorted set: by when they are due
local RETRYING = S .. ':retrying'  -- sorted set: by when they are due
local DEADLINES = S .. ':deadlines' -- sorted set: waiting jobs that have a deadline, by it
local TOTALS = S .. ':totals'      -- hash: jobs over by state, tokens, numerics class
-- version, state, flags, epoch, attempts, attempts_max, expires_at (0: never), finished_at, cost,
-- bytes of place, bytes of job. As `Head` in record.rs.
local HEAD, HEAD_BYTES, VERSION = '>Bc1BI8I4I4I8I8I4I2I4', 45, 1
local HAS_SAVED, HAS_ERRORS = 1, 2 -- flags
local SETS = { q = QUEUED, r = LEASES, s = SCHEDULED, t = RETRYING }
local NAMES = { c = 'completed', f = 'failed', x = 'cancelled', e = 'expired' }
local PAGE = 1000                  -- arguments of one command; even

local function clock()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- One command on a key with any number of arguments.
local function many(command, key, arguments)
  for from = 1, #arguments, PAGE do
    local to = math.min(from + PAGE - 1, #arguments)
    redis.call(command, key, unpack(arguments, from, to))
  end
end

-- The heads of jobs with the bytes after them; false for those that are not there.
local function values(ids)
  local found = {}
  for from = 1, #ids, PAGE do
    local keys = {}
    for i = from, math.min(from + PAGE - 1, #ids) do keys[#keys + 1] = JOB .. ids[i] end
    for _, value in ipairs(redis.call('MGET', unpack(keys))) do found[#found + 1] = value end
  end
  return found
end

-- The head of a value; nil if it is none of ours.
local function parse(value)
  if not value or #value < HEAD_BYTES or value:byte() ~= VERSION then return nil end
  local head, version = {}, nil
  version, head.state, head.flags, head.epoch, head.attempts, head.attempts_max, head.expires_at,
    head.finished_at, head.cost, head.place_bytes, head.job_bytes = struct.unpack(HEAD, value)
  return head
end

local function packed(head)
  return struct.pack(HEAD, VERSION, head.state, head.flags, head.epoch, head.attempts,
    head.attempts_max, head.expires_at, head.finished_at, head.cost, head.place_bytes,
    head.job_bytes)
end

local function head_of(id) return parse(redis.call('GETRANGE', JOB .. id, 0, HEAD_BYTES - 1)) end

local function write(id, head) redis.call('SETRANGE', JOB .. id, 0, packed(head)) end

local function has(head, flag) return math.floor(head.flags / flag) % 2 == 1 end

local function job_of(head, value)
  local start = HEAD_BYTES + head.place_bytes
  return value:sub(start + 1, start + head.job_bytes)
end

-- Ends a job: what it was is kept for `retention` ms, with its outcome. The caller takes it out of
-- its sets and counts it.
local function over(id, head, value, state, outcome, now, retention)
  head.state, head.finished_at = state, now
  if has(head, HAS_SAVED) then
    redis.call('DEL', SAVED .. id)
    head.flags = head.flags - HAS_SAVED
  end
  if has(head, HAS_ERRORS) then redis.call('PEXPIRE', ERRORS .. id, retention) end
  local kept = value:sub(HEAD_BYTES + 1, HEAD_BYTES + head.place_bytes + head.job_bytes)
  redis.call('SET', JOB .. id, packed(head) .. kept .. outcome, 'PX', retention)
end

-- Keeps an attempt's error; the caller writes the head.
local function note(id, head, error)
  head.attempts = head.attempts + 1
  if not has(head, HAS_ERRORS) then head.flags = head.flags + HAS_ERRORS end
  redis.call('RPUSH', ERRORS .. id, error)
end

-- Counts jobs that are over.
local function total(counts)
  for name, count in pairs(counts) do
    if count > 0 then redis.call('HINCRBY', TOTALS, name, count) end
  end
end
