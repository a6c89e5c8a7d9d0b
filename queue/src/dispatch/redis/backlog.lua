-- Returns the backlog: {entries, tokens, age of the oldest in ms or -1, tokens drained per second or -1
-- (as text), delayed entries}. The age is computed over the ARGV[1] least served tenants of each
-- priority, which have the longest waits.
local now, oldest = now_ms(), nil

local function look(entry)
  local ms = tonumber(entry:match('^%d+'))
  if not oldest or ms < oldest then oldest = ms end
end

for _, priority in ipairs(PRIORITIES) do
  local active = redis.call('ZRANGE', P .. ':active:' .. priority, 0, tonumber(ARGV[1]) - 1)
  for _, tenant in ipairs(active) do
    local place = priority .. ':' .. tenant
    local stream, first = stream_of(place), redis.call('ZRANGE', front_of(place), 0, 0)[1]
    -- The first 48 bits of an id are its time in ms.
    local ms = first and tonumber(first:sub(1, 8) .. first:sub(10, 13), 16)
    if ms then look(string.format('%.0f', ms)) end
    for _, name in ipairs({ stream, stream_of(again_of(place)) }) do
      local parked = redis.pcall('XPENDING', name, GROUP, '-', '+', 1, RETURNED)
      if not parked.err and #parked > 0 then look(parked[1][1]) end
    end
    local groups = redis.pcall('XINFO', 'GROUPS', stream)
    for _, group in ipairs(groups.err and {} or groups) do
      local named = {}
      for i = 1, #group, 2 do named[group[i]] = group[i + 1] end
      if named.name == GROUP then
        local after = '(' .. named['last-delivered-id']
        local fresh = redis.call('XRANGE', stream, after, '+', 'COUNT', 1)
        if fresh[1] then look(fresh[1][1]) end
      end
    end
  end
end
local waiting = redis.call('HMGET', META, 'n', 't')
local rate = drain_rate(now)
return {
  math.max(0, tonumber(waiting[1] or 0)),
  math.max(0, tonumber(waiting[2] or 0)),
  oldest and math.max(0, now - oldest) or -1,
  rate and string.format('%.3f', rate * 1000) or '-1',
  redis.call('ZCARD', DUE),
}
