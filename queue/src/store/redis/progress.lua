-- Counts of jobs and tokens. Returns them in the order of `Progress`.
local waiting = {}
for n, set in ipairs({ SCHEDULED, QUEUED, LEASES, RETRYING }) do
  waiting[n] = redis.call('ZCARD', set)
end
local ended = redis.call('HMGET', TOTALS, 'completed', 'failed', 'cancelled', 'expired',
  'prompt_tokens', 'completion_tokens')
for n = 1, 6 do waiting[4 + n] = tonumber(ended[n] or 0) end
return waiting
