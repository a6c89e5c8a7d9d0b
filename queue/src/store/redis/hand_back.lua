-- Gives claims back, at no cost. ARGV: now, then id and epoch of each. Returns the positions (from 0)
-- of those that held.
local held, back, queued = {}, {}, {}
for i = 2, #ARGV, 2 do
  local id, head = ARGV[i], head_of(ARGV[i])
  if head and head.state == 'r' and head.epoch == tonumber(ARGV[i + 1]) then
    head.state, head.epoch = 'q', head.epoch + 1
    write(id, head)
    if head.expires_at > 0 then redis.call('ZADD', DEADLINES, head.expires_at, id) end
    held[#held + 1], back[#back + 1] = (i - 2) / 2, id
    queued[#queued + 1], queued[#queued + 2] = 0, id
  end
end
many('ZREM', LEASES, back)
many('ZADD', QUEUED, queued)
return held
