-- Appends events to a job's stream and sets its expiry; one atomic step.
-- KEYS: the job's stream, its bucket's ends (sorted set: job -> ms at which its stream expires), its
-- bucket's sizes (hash: job -> BYTES:FLAG, and `total`, the sum). Flags: o open, c cut (an event was
-- dropped, so later text would have a gap), f finished.
-- ARGV: job, ms that a running job's stream is kept, ms that a finished job's is kept, streams_max,
-- bytes_max, bytes and events of one stream, then for each event: kind (s start, d text, f end) and bytes.
-- Returns the number of dropped events.
local STREAM, ENDS, SIZES = KEYS[1], KEYS[2], KEYS[3]
local id, FIRST = ARGV[1], 8
local running, finished = tonumber(ARGV[2]), tonumber(ARGV[3])
local streams_max, bytes_max = tonumber(ARGV[4]), tonumber(ARGV[5])
local own_bytes_max, own_events_max = tonumber(ARGV[6]), tonumber(ARGV[7])
local OVERHEAD = 32 -- bytes that Redis uses for an entry besides its value
local FORGET_MAX = 100

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

-- Forgets streams that have expired. Each call adds at most one stream and forgets up to FORGET_MAX.
local gone = redis.call('ZRANGEBYSCORE', ENDS, '-inf', now, 'LIMIT', 0, FORGET_MAX)
if #gone > 0 then
  local freed = 0
  for _, size in ipairs(redis.call('HMGET', SIZES, unpack(gone))) do
    freed = freed + tonumber(size and size:match('^%d+') or 0)
  end
  redis.call('ZREM', ENDS, unpack(gone))
  redis.call('HDEL', SIZES, unpack(gone))
  redis.call('HINCRBY', SIZES, 'total', -freed)
end
local streams = redis.call('ZCARD', ENDS)
-- Without known streams a sum is left over from lost data.
if streams == 0 then redis.call('DEL', SIZES) end

local total = math.max(0, tonumber(redis.call('HGET', SIZES, 'total') or 0))
local own, flag = (redis.call('HGET', SIZES, id) or ''):match('^(%d+):(%l)$')
own = tonumber(own or 0)
-- A stream that was lost or deleted has to begin anew.
if flag and redis.call('EXISTS', STREAM) == 0 then
  total, own, flag = total - own, 0, flag == 'f' and 'f' or 'c'
end
local before, was, dropped = own, flag, 0

local function append(value)
  redis.call('XADD', STREAM, '*', 'e', value)
  own, total = own + #value + OVERHEAD, total + #value + OVERHEAD
end

for i = FIRST, #ARGV, 2 do
  local kind, value = ARGV[i], ARGV[i + 1]
  if kind == 's' and flag and flag ~= 'o' then
    -- A new attempt: subscribers discard the text of the earlier one. Ids go on after its last.
    redis.call('XTRIM', STREAM, 'MAXLEN', 0)
    total, own, flag = total - own, 0, 'o'
  elseif kind ~= 'd' and not flag and streams < streams_max and total < bytes_max then
    flag = 'o'
  end
  local size = #value + OVERHEAD
  if not flag or (flag == 'f' and kind ~= 'f') then
    dropped = dropped + 1
  elseif kind == 'f' then
    -- An end is small, and there is one for each stream.
    append(value)
    flag = 'f'
  elseif flag == 'c' or total + size > bytes_max or own + size > own_bytes_max
    or redis.call('XLEN', STREAM) >= own_events_max then
    dropped = dropped + 1
    flag = 'c'
  else
    append(value)
  end
end

-- Events after the end do not prolong the stream.
if not flag or (was == 'f' and own == before) then return dropped end
local ends = now + (flag == 'f' and finished or running)
redis.call('PEXPIREAT', STREAM, ends)
redis.call('ZADD', ENDS, ends, id)
redis.call('HSET', SIZES, id, string.format('%d:%s', own, flag), 'total', string.format('%d', total))
-- The bucket's keys expire with its last stream.
local last = redis.call('ZRANGE', ENDS, -1, -1, 'WITHSCORES')
redis.call('PEXPIREAT', ENDS, last[2])
redis.call('PEXPIREAT', SIZES, last[2])
return dropped
