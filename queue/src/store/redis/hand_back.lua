-- Hands claims back without counting an attempt. ARGV: now, 1 if one of the jobs may have broken an
-- engine, then each claim (`ID:TAG`). Returns the positions (from 0) of the valid claims.
local back, leases, queued = {}, {}, {}
for i = 3, #ARGV do
  local id = id_of(ARGV[i])
  local head = head_of(id)
  if head and head.state == 'r' and head.epoch % TAG == tonumber(ARGV[i]:sub(38)) then
    leases[#leases + 1] = claim_of(id, head.epoch)
    head.state = 'q'
    next_epoch(head, 0)
    if ARGV[2] == '1' then mark(head, SUSPECT, true) end
    write(id, head)
    if head.expires_at > 0 then redis.call('ZADD', DEADLINES, head.expires_at, id) end
    back[#back + 1] = i - 3
    queued[#queued + 1], queued[#queued + 2] = '0', id
  end
end
many('ZREM', LEASES, leases)
many('ZADD', QUEUED, queued)
return back
