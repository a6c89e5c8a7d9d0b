-- Moves jobs that are due or expired, up to a number of each kind.
-- ARGV: now, retention in ms, that number, time in ms without a reconciler after which Redis was away,
-- lease in ms after that, error of a lost lease, outcome of a job that failed by one, outcome of an expired job.
-- Returns {number moved, whether there may be more, {id, place, cost} of each job that is queued now}.
local now, retention, limit = clock(), ARGV[2], tonumber(ARGV[3])
local moved, more, queued = 0, 0, {}

-- If no reconciler came for a while, no worker could renew.
local before = tonumber(redis.call('HGET', TOTALS, 'pulse') or now)
redis.call('HSET', TOTALS, 'pulse', text(now))
if before + ARGV[4] < now then
  local ends, leases = text(now + ARGV[5]), {}
  for n, claim in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', ends)) do
    leases[2 * n - 1], leases[2 * n] = ends, claim
  end
  many('ZADD', LEASES, leases)
end

-- Visits the due members of a set with their strings; members without a string leave the set.
local function due(set, visit)
  local members, ids = redis.call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', 0, limit), {}
  if #members == limit then more = 1 end
  for n, member in ipairs(members) do ids[n] = member:match('^[^:]*') end
  for n, value in ipairs(values(ids)) do
    redis.call('ZREM', set, members[n])
    local head = parse(value)
    if head then
      visit(ids[n], head, value)
      moved = moved + 1
    end
  end
end

local function queue(id, head, value)
  queued[#queued + 1] = { id, value:sub(HEAD_BYTES + 1, HEAD_BYTES + head.place_bytes), head.cost }
  head.state = 'q'
  write(id, head)
  redis.call('ZADD', QUEUED, 0, id)
end

local failed, expired = 0, 0
due(LEASES, function(id, head, value)
  mark(head, has(head, LOST) and SUSPECT or LOST, true)
  local charged = has(head, ALONE)
  if charged then note(id, head, ARGV[6]) end
  if charged and head.attempts >= head.attempts_max then
    over(id, head, value, 'f', ARGV[7], now, retention)
    failed = failed + 1
  else
    mark(head, LAPSED, true)
    queue(id, head, value)
    if head.expires_at > 0 then redis.call('ZADD', DEADLINES, head.expires_at, id) end
  end
end)
due(DEADLINES, function(id, head, value)
  leave(id, head)
  over(id, head, value, 'e', ARGV[8], now, retention)
  expired = expired + 1
end)
due(SCHEDULED, queue)
due(RETRYING, queue)
total({ failed = failed, expired = expired })
return { moved, more, queued }
