-- Claims the jobs that are queued or have an expired lease.
-- ARGV: now, lease in ms, error of a lost lease, then ids. Returns {position from 0, epoch, attempts,
-- ms to the deadline or -1, the job's string, checkpoint or nil} of each.
local now = clock()
local ends = text(now + ARGV[2])
local ids, seen, claims = {}, {}, {}
for i = 4, #ARGV do ids[i - 3] = ARGV[i] end
local queued, leases, accepted = {}, {}, 0
for n, value in ipairs(values(ids)) do
  local id, head = ids[n], parse(value)
  if head and not seen[id] and (head.expires_at == 0 or head.expires_at > now) then
    local before = head.state == 'r' and claim_of(id, head.epoch)
    local lapsed = before and head.attempts + 1 < head.attempts_max
      and tonumber(redis.call('ZSCORE', LEASES, before) or 0) <= now
    if head.state == 'q' or head.state == 'a' or lapsed then
      seen[id] = true
      if lapsed then
        note(id, head, ARGV[3])
        redis.call('ZREM', LEASES, before)
      elseif head.state == 'a' then
        accepted = accepted + 1
      else
        queued[#queued + 1] = id
      end
      if head.expires_at > 0 then redis.call('ZREM', DEADLINES, id) end
      head.state, head.epoch = 'r', head.epoch + 1
      write(id, head)
      leases[#leases + 1], leases[#leases + 2] = ends, claim_of(id, head.epoch)
      local saved = has(head, HAS_SAVED) and redis.call('GET', SAVED .. id)
      local left = head.expires_at > 0 and head.expires_at - now or -1
      claims[#claims + 1] = { n - 1, head.epoch, head.attempts, left, value, saved }
    end
  end
end
count_accepted(-accepted)
many('ZREM', QUEUED, queued)
many('ZADD', LEASES, leases)
return claims
