--[[
  Sets what the queue lacks of the store's queued jobs.

  ARGV[1]  entries
  ARGV[2]  their tokens
  ARGV[3]  whether a refill is under way (0 or 1)

  Returns 1
]]
local entries, tokens, refilling = ARGV[1], ARGV[2], ARGV[3]

redis.call('HSET', meta_key, 'missing_entries', entries, 'missing_tokens', tokens, 'refilling', refilling,
  'run_id', server_run_id())
return 1
