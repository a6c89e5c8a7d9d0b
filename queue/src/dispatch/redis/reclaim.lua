--[[
  Takes over entries that other consumers have not renewed.

  ARGV[1]  consumer
  ARGV[2]  most entries to take
  ARGV[3]  time without a renewal, in ms
  ARGV[4]  cursor over the streams, 0 at first

  Returns {next cursor, number of entries that other programs deleted, number of foreign entries dropped,
  {{job, place:entry, number of deliveries}, …}}

  XAUTOCLAIM would also take the consumer's own entries and those that were handed back. So this does the same with
  XPENDING IDLE and XCLAIM, page by page. Entries of RETURNED_CONSUMER are taken only where the count of returned
  entries lacks them, so that a wrong count cannot strand them.
]]
local consumer, entries_max, idle_ms, cursor = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local PAGE = 64
local taken, deleted, foreign = {}, 0, 0

local function take(place, pending)
  local entry, deliveries = pending[1], pending[4]
  local claimed = redis.call('XCLAIM', stream_key(place), GROUP, consumer, 0, entry)
  if #claimed == 0 or not claimed[1] then
    -- Redis 7 drops a pending entry without data; a reconciler enqueues the job again.
    deleted = deleted + 1
    return
  end
  local id = decode_entry(claimed[1][2])
  if id and entry_of(id) == place .. ':' .. entry then
    taken[#taken + 1] = { id, place .. ':' .. entry, deliveries + 1 }
  else
    drop_entry(place, entry)
    foreign = foreign + 1
  end
end

local page = redis.call('SSCAN', streams_key, cursor, 'COUNT', PAGE)
for _, place in ipairs(page[2]) do
  local start = '-'
  local skipped = redis.call('HEXISTS', returned_key, place) == 1 and RETURNED_CONSUMER or consumer
  while start and #taken < entries_max do
    local pending =
      redis.pcall('XPENDING', stream_key(place), GROUP, 'IDLE', idle_ms, start, '+', PAGE)
    if pending.err then break end
    for _, item in ipairs(pending) do
      local owner = item[2]
      if #taken < entries_max and owner ~= consumer and owner ~= skipped then take(place, item) end
    end
    start = #pending == PAGE and '(' .. pending[PAGE][1] or nil
  end
  if deleted + foreign > 0 then foreign = foreign + close_stream(place) end
end
return { page[1], deleted, foreign, taken }
