-- Deletes all data of the queue: the streams first, then the counters.
for _, place in ipairs(redis.call('SMEMBERS', STREAMS)) do
  redis.call('DEL', stream_of(place), front_of(place))
end
for _, priority in ipairs(PRIORITIES) do
  redis.call('DEL', P .. ':active:' .. priority, P .. ':owed:' .. priority)
end
redis.call('DEL', IDS, META, STREAMS, COUNTS, COSTS, PARKED, DUE, BELLS)
return 1
