-- Keeps what running attempts have saved. ARGV: now, then id, epoch and bytes of each. Returns the
-- positions (from 0) of the claims that hold no more.
local lost = {}
for i = 2, #ARGV, 3 do
  local id, head = ARGV[i], head_of(ARGV[i])
  if head and head.state == 'r' and head.epoch == tonumber(ARGV[i + 1]) then
    redis.call('SET', SAVED .. id, ARGV[i + 2])
    if not has(head, HAS_SAVED) then
      head.flags = head.flags + HAS_SAVED
      write(id, head)
    end
  else
    lost[#lost + 1] = (i - 2) / 3
  end
end
return lost
