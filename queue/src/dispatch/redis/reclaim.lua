-- Takes over entries that other consumers have not renewed.
-- ARGV: consumer max idle_ms cursor. Returns {next cursor over the streams, entries deleted by other
-- programs, foreign entries dropped, {{id, place:entry, deliveries}, …}}.
--
-- XAUTOCLAIM would also take the consumer's own entries and those handed back. So this does the same with
-- XPENDING IDLE and XCLAIM, page by page. Entries of RETURNED are taken only where PARKED has no count
-- for them, so that a wrong count cannot strand them.
local PAGE = 64
local me, max, idle = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local taken, deleted, foreign = {}, 0, 0

local function take(place, item)
  local stream = stream_of(place)
  local claimed = redis.call('XCLAIM', stream, GROUP, me, 0, item[1])
  if #claimed == 0 or not claimed[1] then
    -- Redis 7 drops a pending entry without data; a reconciler enqueues the job again.
    deleted = deleted + 1
    return
  end
  local id = decode(claimed[1][2])
  if id and located(id) == place .. ':' .. item[1] then
    taken[#taken + 1] = { id, place .. ':' .. item[1], item[4] + 1 }
  else
    drop(place, item[1])
    foreign = foreign + 1
  end
end

local page = redis.call('SSCAN', STREAMS, ARGV[4], 'COUNT', PAGE)
for _, place in ipairs(page[2]) do
  local start, skipped = '-', redis.call('HEXISTS', PARKED, parked_of(place)) == 1 and RETURNED or me
  while start and #taken < max do
    local pending = redis.pcall('XPENDING', stream_of(place), GROUP, 'IDLE', idle, start, '+', PAGE)
    if pending.err then break end
    for _, item in ipairs(pending) do
      if #taken < max and item[2] ~= me and item[2] ~= skipped then take(place, item) end
    end
    start = #pending == PAGE and '(' .. pending[PAGE][1] or nil
  end
  if deleted + foreign > 0 then foreign = foreign + close(place) end
end
return { page[1], deleted, foreign, taken }
