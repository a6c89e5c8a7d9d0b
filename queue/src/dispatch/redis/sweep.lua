--[[
  Removes consumers without entries that have been idle for a time, from a page of streams. Check and removal are one
  script, so that no entry can be delivered in between and be orphaned.

  ARGV[1]  cursor over the streams, 0 at first
  ARGV[2]  idle time in ms

  Returns {next cursor, number of consumers removed}
]]
local cursor, idle_ms = ARGV[1], tonumber(ARGV[2])
local PAGE = 64

local page, removed = redis.call('SSCAN', streams_key, cursor, 'COUNT', PAGE), 0
for _, place in ipairs(page[2]) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream_key(place), GROUP)
  for _, values in ipairs(consumers.err and {} or consumers) do
    local consumer = named(values)
    if consumer.pending == 0 and consumer.idle >= idle_ms then
      redis.call('XGROUP', 'DELCONSUMER', stream_key(place), GROUP, consumer.name)
      removed = removed + 1
    end
  end
end
return { page[1], removed }
