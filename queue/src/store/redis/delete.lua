-- Deletes jobs, whatever their state, and with no ids all that counts them. ARGV: now, then ids.
-- Returns how many there were.
local count = 0
for i = 2, #ARGV do
  local id = ARGV[i]
  for _, set in ipairs({ QUEUED, LEASES, SCHEDULED, RETRYING, DEADLINES }) do
    redis.call('ZREM', set, id)
  end
  count = count + redis.call('DEL', JOB .. id)
  redis.call('DEL', SAVED .. id, ERRORS .. id)
end
if #ARGV == 1 then redis.call('DEL', QUEUED, LEASES, SCHEDULED, RETRYING, DEADLINES, TOTALS) end
return count
