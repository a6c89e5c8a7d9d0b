--[[
  Deletes all data of the queue: the streams first, then the counters.

  ARGV[1]  milliseconds until then, 0 for at once

  Returns 1
]]
local after = tonumber(ARGV[1])

local function forget(key)
  if after == 0 then
    redis.call('DEL', key)
  else
    redis.call('PEXPIRE', key, after)
  end
end

for _, place in ipairs(redis.call('SMEMBERS', streams_key)) do
  forget(stream_key(place))
  forget(front_key(place))
end
for _, priority in ipairs(PRIORITIES) do
  forget(active_key(priority))
  forget(owed_key(priority))
end
for _, key in ipairs({ locations_key, meta_key, streams_key, waiting_entries_key, waiting_tokens_key, returned_key, due_key,
  wakeups_key }) do
  forget(key)
end
return 1
