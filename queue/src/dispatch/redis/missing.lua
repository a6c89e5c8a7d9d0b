-- Returns what the queue lacks: entries, tokens, whether a refill is under way. Nothing if the server is not
-- the one that it was set on: after a restart or a failover some entries may be lost.
local values = redis.call('HMGET', META, 'missing', 'missing_t', 'refilling', 'run')
if not values[1] or values[4] ~= run_id() then return {} end
return { values[1], values[2], values[3] }
