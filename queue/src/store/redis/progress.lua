-- Returns counts of jobs and tokens, in the order of `Progress`.
local waiting = {}
for n, set in ipairs({ SCHEDULED, QUEUED, LEASES, RETRYING }) do
  waiting[n] = redis.call('ZCARD', set)
end
local ended = redis.call('HMGET', TOTALS, 'accepted', 'completed', 'failed', 'cancelled', 'expired',
  'prompt_tokens', 'completion_tokens')
waiting[2] = waiting[2] + tonumber(ended[1] or 0)
for n = 2, 7 do waiting[3 + n] = tonumber(ended[n] or 0) end
return waiting
