-- Claims those jobs that are queued or whose lease is over.
-- ARGV: now, lease in ms, error of a lost lease, then ids. Returns {position from 0, epoch, attempts,
-- ms to the deadline or -1, job, checkpoint or nil} of each.
local now, lease = clock(), tonumber(ARGV[2])
local ids, seen, claims = {}, {}, {}
for i = 4, #ARGV do ids[#ids + 1] = ARGV[i] end
local queued, leases = {}, {}
for n, value in ipairs(values(ids)) do
  local id, head = ids[n], parse(value)
  if head and not seen[id] and (head.expires_at == 0 or head.expires_at > now) then
    local lapsed = head.state == 'r' and head.attempts + 1 < head.attempts_max
      and tonumber(redis.call('ZSCORE', LEASES, id) or 0) <= now
    if head.state == 'q' or lapsed then
      seen[id] = true
      if lapsed then note(id, head, ARGV[3]) else queued[#queued + 1] = id end
      if head.expires_at > 0 then redis.call('ZREM', DEADLINES, id) end
      head.state, head.epoch = 'r', head.epoch + 1
      write(id, head)
      leases[#leases + 1], leases[#leases + 2] = now + lease, id
      local saved = has(head, HAS_SAVED) and redis.call('GET', SAVED .. id)
      local left = head.expires_at > 0 and head.expires_at - now or -1
      claims[#claims + 1] = { n - 1, head.epoch, head.attempts, left, job_of(head, value), saved }
    end
  end
end
many('ZREM', QUEUED, queued)
many('ZADD', LEASES, leases)
return claims
