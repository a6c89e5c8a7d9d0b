--[[
  Tells what the queue lacks of the store's queued jobs.

  Returns {entries, tokens, whether a refill is under way (0 or 1)}; {} if the server is not the one that this was set
  on: after a restart or a failover some entries may be lost
]]
local values = redis.call('HMGET', meta_key, 'missing_entries', 'missing_tokens', 'refilling', 'run_id')
if not values[1] or values[4] ~= server_run_id() then return {} end
return { values[1], values[2], values[3] }
