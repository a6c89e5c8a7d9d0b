--[[
  Deletes all data of the queue: the streams first, then the counters.

  Returns 1
]]
for _, place in ipairs(redis.call('SMEMBERS', streams_key)) do
  redis.call('DEL', stream_key(place), front_key(place))
end
for _, priority in ipairs(PRIORITIES) do
  redis.call('DEL', active_key(priority), owed_key(priority))
end
redis.call('DEL', locations_key, meta_key, streams_key, waiting_entries_key, waiting_tokens_key, returned_key, due_key,
  wakeups_key)
return 1
