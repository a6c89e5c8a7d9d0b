-- Returns the finished jobs. ARGV: now, then ids. Returns {position from 0, state, outcome} of each.
local ended = {}
for i = 2, #ARGV do
  local head = head_of(ARGV[i])
  if head and NAMES[head.state] then
    ended[#ended + 1] = { i - 2, head.state, redis.call('GETRANGE',
      JOB .. ARGV[i], HEAD_BYTES + head.place_bytes + head.job_bytes, -1) }
  end
end
return ended
