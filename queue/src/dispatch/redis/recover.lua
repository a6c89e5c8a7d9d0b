--[[
  Finds entries that are pending with the consumer and unknown to it: the answer to their pull was lost.

  ARGV[1]   consumer
  ARGV[2]   cursor over the streams, 0 at first
  ARGV[3…]  the known entries, as place:entry

  Returns {next cursor, {{job, place:entry, number of deliveries}, …}}
]]
local consumer, cursor = ARGV[1], ARGV[2]
local FIRST_KNOWN, PAGE = 3, 64

local known, found = {}, {}
for i = FIRST_KNOWN, #ARGV do known[ARGV[i]] = true end
local page = redis.call('SSCAN', streams_key, cursor, 'COUNT', PAGE)
for _, place in ipairs(page[2]) do
  local stream, start = stream_key(place), '-'
  while start do
    local pending = redis.pcall('XPENDING', stream, GROUP, start, '+', PAGE, consumer)
    if pending.err then break end
    for _, item in ipairs(pending) do
      local entry, deliveries = item[1], item[4]
      local place_and_entry = place .. ':' .. entry
      if not known[place_and_entry] then
        local data = redis.call('XRANGE', stream, entry, entry)
        local id = decode_entry(data[1] and data[1][2])
        if id and entry_of(id) == place_and_entry then
          redis.call('XCLAIM', stream, GROUP, consumer, 0, entry, 'JUSTID')
          found[#found + 1] = { id, place_and_entry, deliveries }
        end
      end
    end
    start = #pending == PAGE and '(' .. pending[PAGE][1] or nil
  end
end
return { page[1], found }
