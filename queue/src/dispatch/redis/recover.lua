-- Finds entries that are pending with the consumer and unknown to it: the answer to their pull was
-- lost.
-- ARGV: consumer cursor, then the known entries, as place:entry. Returns {next cursor over the streams,
-- {{id, place:entry, deliveries}, …}}.
local PAGE = 64
local me, known, found = ARGV[1], {}, {}
for i = 3, #ARGV do known[ARGV[i]] = true end
local page = redis.call('SSCAN', STREAMS, ARGV[2], 'COUNT', PAGE)
for _, place in ipairs(page[2]) do
  local stream, start = stream_of(place), '-'
  while start do
    local pending = redis.pcall('XPENDING', stream, GROUP, start, '+', PAGE, me)
    if pending.err then break end
    for _, item in ipairs(pending) do
      local here = place .. ':' .. item[1]
      if not known[here] then
        local data = redis.call('XRANGE', stream, item[1], item[1])
        local id = decode(data[1] and data[1][2])
        if id and located(id) == here then
          redis.call('XCLAIM', stream, GROUP, me, 0, item[1], 'JUSTID')
          found[#found + 1] = { id, here, item[4] }
        end
      end
    end
    start = #pending == PAGE and '(' .. pending[PAGE][1] or nil
  end
end
return { page[1], found }
