-- Moves what time has moved, up to a number of jobs of each kind.
-- ARGV: now, retention in ms, that number, error of a lost lease, outcome of a job that failed by one,
-- outcome of an expired job. Returns {how many were moved, whether there may be more}.
local now, retention, limit = clock(), tonumber(ARGV[2]), tonumber(ARGV[3])
local moved, more = 0, 0

-- The members of a set whose time has come, with their values; what has no value leaves the set.
local function due(set, visit)
  local ids = redis.call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', 0, limit)
  if #ids == limit then more = 1 end
  for n, value in ipairs(values(ids)) do
    redis.call('ZREM', set, ids[n])
    local head = parse(value)
    if head then
      visit(ids[n], head, value)
      moved = moved + 1
    end
  end
end

local function queue(id, head)
  head.state = 'q'
  write(id, head)
  redis.call('ZADD', QUEUED, 0, id)
end

local failed, expired = 0, 0
due(LEASES, function(id, head, value)
  note(id, head, ARGV[4])
  if head.attempts >= head.attempts_max then
    over(id, head, value, 'f', ARGV[5], now, retention)
    failed = failed + 1
  else
    queue(id, head)
    if head.expires_at > 0 then redis.call('ZADD', DEADLINES, head.expires_at, id) end
  end
end)
due(DEADLINES, function(id, head, value)
  redis.call('ZREM', SETS[head.state] or DEADLINES, id)
  over(id, head, value, 'e', ARGV[6], now, retention)
  expired = expired + 1
end)
due(SCHEDULED, queue)
due(RETRYING, queue)
total({ failed = failed, expired = expired })
return { moved, more }
