-- Claims the queued jobs. ARGV: now, lease in ms, tag of the claim, then ids. Returns {position from 0,
-- epoch, attempts, 1 if it runs alone, ms to the deadline or -1, the job's string, checkpoint or nil} of
-- each.
local now, tag = clock(), tonumber(ARGV[3])
local ends = text(now + ARGV[2])
local ids, seen, claims = {}, {}, {}
for i = 4, #ARGV do ids[i - 3] = ARGV[i] end
local queued, leases, accepted = {}, {}, 0
for n, value in ipairs(values(ids)) do
  local id, head = ids[n], parse(value)
  local is_free = head and not seen[id] and (head.state == 'q' or head.state == 'a')
  if is_free and (head.expires_at == 0 or head.expires_at > now) then
    seen[id] = true
    if head.state == 'a' then
      accepted = accepted + 1
    else
      queued[#queued + 1] = id
    end
    if head.expires_at > 0 then redis.call('ZREM', DEADLINES, id) end
    head.state = 'r'
    next_epoch(head, tag)
    mark(head, ALONE, has(head, SUSPECT))
    mark(head, LAPSED, false)
    write(id, head)
    leases[#leases + 1], leases[#leases + 2] = ends, claim_of(id, head.epoch)
    local saved = has(head, HAS_SAVED) and redis.call('GET', SAVED .. id)
    local left = head.expires_at > 0 and head.expires_at - now or -1
    local alone = has(head, ALONE) and 1 or 0
    claims[#claims + 1] = { n - 1, head.epoch, head.attempts, alone, left, value, saved }
  end
end
count_accepted(-accepted)
many('ZREM', QUEUED, queued)
many('ZADD', LEASES, leases)
return claims
