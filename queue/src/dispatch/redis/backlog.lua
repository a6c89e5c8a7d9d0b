--[[
  Tells what waits, how old it is and how fast it is drained.

  ARGV[1]  number of tenants of each priority in which the oldest entry is searched: the least served ones, which have
           the longest waits

  Returns {waiting entries, waiting tokens, age of the oldest in ms or -1, tokens drained per second (as text, -1 if
  unknown), delayed entries}
]]
local tenants_max = tonumber(ARGV[1])
local now, oldest_ms = now_ms(), nil

local function note(entry)
  local ms = tonumber(entry:match('^%d+'))
  if not oldest_ms or ms < oldest_ms then oldest_ms = ms end
end

for _, priority in ipairs(PRIORITIES) do
  for _, tenant in ipairs(redis.call('ZRANGE', active_key(priority), 0, tenants_max - 1)) do
    local place = priority .. ':' .. tenant
    local stream, first_job = stream_key(place), redis.call('ZRANGE', front_key(place), 0, 0)[1]
    local ms = first_job and submitted_ms(first_job)
    if ms then note(string.format('%.0f', ms)) end
    for _, name in ipairs({ stream, stream_key(requeued_place(place)) }) do
      local returned = redis.pcall('XPENDING', name, GROUP, '-', '+', 1, RETURNED_CONSUMER)
      if not returned.err and #returned > 0 then note(returned[1][1]) end
    end
    local delivered = last_delivered(stream)
    local fresh = delivered and redis.call('XRANGE', stream, '(' .. delivered, '+', 'COUNT', 1)
    if fresh and fresh[1] then note(fresh[1][1]) end
  end
end
local waiting = redis.call('HMGET', meta_key, 'entries', 'tokens')
local rate = drain_rate(now)
return {
  math.max(0, tonumber(waiting[1] or 0)),
  math.max(0, tonumber(waiting[2] or 0)),
  oldest_ms and math.max(0, now - oldest_ms) or -1,
  rate and string.format('%.3f', rate * 1000) or '-1',
  redis.call('ZCARD', due_key),
}
