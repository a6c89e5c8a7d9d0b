-- Deletes jobs in any state; without ids, all sets and counters. ARGV: now, then ids. Returns how many
-- jobs existed.
local count = 0
for i = 2, #ARGV do
  local id = ARGV[i]
  local head = head_of(id)
  if head then leave(id, head) end
  if head and head.expires_at > 0 then redis.call('ZREM', DEADLINES, id) end
  count = count + redis.call('DEL', JOB .. id)
  redis.call('DEL', SAVED .. id, ERRORS .. id)
end
if #ARGV == 1 then redis.call('DEL', QUEUED, LEASES, SCHEDULED, RETRYING, DEADLINES, TOTALS) end
return count
