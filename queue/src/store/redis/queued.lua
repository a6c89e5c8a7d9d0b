-- A page of queued jobs in order of id. ARGV: now, the id before the page or nothing, page size.
-- Returns {id, place, cost} of each.
local PLACE_BYTES = 128 -- read with the head; a longer place is read again
local from = ARGV[2] == '' and '-' or '(' .. ARGV[2]
local ids = redis.call('ZRANGEBYLEX', QUEUED, from, '+', 'LIMIT', 0, tonumber(ARGV[3]))
local found = {}
for _, id in ipairs(ids) do
  local value = redis.call('GETRANGE', JOB .. id, 0, HEAD_BYTES + PLACE_BYTES - 1)
  local head = parse(value)
  if head then
    local to = HEAD_BYTES + head.place_bytes
    if #value < to then value = redis.call('GETRANGE', JOB .. id, 0, to - 1) end
    found[#found + 1] = { id, value:sub(HEAD_BYTES + 1, to), head.cost }
  else
    redis.call('ZREM', QUEUED, id)
  end
end
return found
