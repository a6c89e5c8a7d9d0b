-- Cancels unfinished jobs. ARGV: now, retention in ms, then ids. Returns the positions (from 0) of the
-- cancelled jobs.
local now, retention, cancelled = clock(), ARGV[2], {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local value = redis.call('GET', JOB .. id)
  local head = parse(value)
  if head and not NAMES[head.state] then
    leave(id, head)
    if head.expires_at > 0 then redis.call('ZREM', DEADLINES, id) end
    next_epoch(head, 0)
    over(id, head, value, 'x', '', now, retention)
    cancelled[#cancelled + 1] = i - 3
  end
end
total({ cancelled = #cancelled })
return cancelled
