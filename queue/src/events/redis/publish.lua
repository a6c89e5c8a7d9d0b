--[[
  Appends events to a job's stream and sets its expiry; one atomic step.

  KEYS[1]   the job's stream
  KEYS[2]   its bucket's ends: sorted set, job -> time in ms at which its stream expires
  KEYS[3]   its bucket's sizes: hash, job -> `BYTES:STATE`, and `total`, the sum
  ARGV[1]   job
  ARGV[2]   ms for which the stream of a running job is kept
  ARGV[3]   ms for which that of a finished job is kept
  ARGV[4]   most streams of the bucket
  ARGV[5]   most bytes of the bucket
  ARGV[6]   most bytes of one stream
  ARGV[7]   most events of one stream
  ARGV[8…]  two for each event: kind (`start`, `text` or `end`), encoded event

  Returns the number of events dropped

  States of a stream: `open`; `cut`, after an event was dropped, so that later text would have a gap; `finished`.
]]
local stream_key, ends_key, sizes_key = KEYS[1], KEYS[2], KEYS[3]
local job = ARGV[1]
local running_ms, finished_ms = tonumber(ARGV[2]), tonumber(ARGV[3])
local streams_max, bytes_max = tonumber(ARGV[4]), tonumber(ARGV[5])
local stream_bytes_max, stream_events_max = tonumber(ARGV[6]), tonumber(ARGV[7])
local FIRST_EVENT = 8
local OVERHEAD = 32 -- bytes that Redis uses for an entry besides its value
local FORGET_MAX = 100

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

-- Forgets streams that have expired. Each call adds at most one stream and forgets up to FORGET_MAX.
local expired = redis.call('ZRANGEBYSCORE', ends_key, '-inf', now, 'LIMIT', 0, FORGET_MAX)
if #expired > 0 then
  local freed = 0
  for _, size in ipairs(redis.call('HMGET', sizes_key, unpack(expired))) do
    freed = freed + tonumber(size and size:match('^%d+') or 0)
  end
  redis.call('ZREM', ends_key, unpack(expired))
  redis.call('HDEL', sizes_key, unpack(expired))
  redis.call('HINCRBY', sizes_key, 'total', -freed)
end
local streams = redis.call('ZCARD', ends_key)
-- Without known streams a sum is left over from lost data.
if streams == 0 then redis.call('DEL', sizes_key) end

local total_bytes = math.max(0, tonumber(redis.call('HGET', sizes_key, 'total') or 0))
local stream_bytes, state = (redis.call('HGET', sizes_key, job) or ''):match('^(%d+):(%l+)$')
stream_bytes = tonumber(stream_bytes or 0)
-- A stream that was lost or deleted has to begin anew.
if state and redis.call('EXISTS', stream_key) == 0 then
  total_bytes, stream_bytes = total_bytes - stream_bytes, 0
  state = state == 'finished' and 'finished' or 'cut'
end
local bytes_before, state_before, dropped = stream_bytes, state, 0

-- The stream has the name of this field once for about a hundred events.
local function append(event)
  redis.call('XADD', stream_key, '*', 'event', event)
  local size = #event + OVERHEAD
  stream_bytes, total_bytes = stream_bytes + size, total_bytes + size
end

for i = FIRST_EVENT, #ARGV, 2 do
  local kind, event = ARGV[i], ARGV[i + 1]
  if kind == 'start' and state and state ~= 'open' then
    -- A new attempt: subscribers discard the text of the earlier one. Ids go on after its last.
    redis.call('XTRIM', stream_key, 'MAXLEN', 0)
    total_bytes, stream_bytes, state = total_bytes - stream_bytes, 0, 'open'
  elseif kind ~= 'text' and not state and streams < streams_max and total_bytes < bytes_max then
    state = 'open'
  end
  local size = #event + OVERHEAD
  if not state or (state == 'finished' and kind ~= 'end') then
    dropped = dropped + 1
  elseif kind == 'end' then
    -- An end is small, and there is one for each stream.
    append(event)
    state = 'finished'
  elseif state == 'cut' or total_bytes + size > bytes_max or stream_bytes + size > stream_bytes_max
    or redis.call('XLEN', stream_key) >= stream_events_max then
    dropped = dropped + 1
    state = 'cut'
  else
    append(event)
  end
end

-- Events after the end do not prolong the stream.
if not state or (state_before == 'finished' and stream_bytes == bytes_before) then return dropped end
local expires_at = now + (state == 'finished' and finished_ms or running_ms)
redis.call('PEXPIREAT', stream_key, expires_at)
redis.call('ZADD', ends_key, expires_at, job)
redis.call('HSET', sizes_key, job, string.format('%d:%s', stream_bytes, state), 'total',
  string.format('%d', total_bytes))
-- The bucket's keys expire with its last stream.
local last = redis.call('ZRANGE', ends_key, -1, -1, 'WITHSCORES')
redis.call('PEXPIREAT', ends_key, last[2])
redis.call('PEXPIREAT', sizes_key, last[2])
return dropped
