-- Removes consumers without entries that have been idle for ARGV[2] ms, from a page of streams.
-- ARGV: cursor idle_ms. Returns {next cursor, number removed}. Check and removal are one script, so that
-- no entry can be delivered in between and be orphaned.
local page, removed = redis.call('SSCAN', STREAMS, ARGV[1], 'COUNT', 64), 0
for _, place in ipairs(page[2]) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream_of(place), GROUP)
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    local named = {}
    for i = 1, #consumer, 2 do named[consumer[i]] = consumer[i + 1] end
    if named.pending == 0 and named.idle >= tonumber(ARGV[2]) then
      redis.call('XGROUP', 'DELCONSUMER', stream_of(place), GROUP, named.name)
      removed = removed + 1
    end
  end
end
return { page[1], removed }
