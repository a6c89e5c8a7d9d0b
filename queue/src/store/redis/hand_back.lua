-- Hands claims back without counting an attempt. ARGV: now, then each claim (`ID:EPOCH`). Returns the
-- positions (from 0) of the valid claims.
local back, leases, queued, done = {}, {}, {}, {}
for _, i in ipairs((held(2, 1))) do
  local id = id_of(ARGV[i])
  local head = not done[id] and head_of(id)
  if head then
    done[id] = true
    head.state, head.epoch = 'q', head.epoch + 1
    write(id, head)
    if head.expires_at > 0 then redis.call('ZADD', DEADLINES, head.expires_at, id) end
    back[#back + 1], leases[#leases + 1] = i - 2, ARGV[i]
    queued[#queued + 1], queued[#queued + 2] = '0', id
  end
end
many('ZREM', LEASES, leases)
many('ZADD', QUEUED, queued)
return back
