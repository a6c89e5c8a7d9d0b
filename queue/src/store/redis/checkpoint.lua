-- Saves checkpoints of running attempts. ARGV: now, then claim (`ID:EPOCH`) and bytes of each. Returns the
-- positions (from 0) of the claims that are lost.
local mine, lost = held(2, 2)
for _, i in ipairs(mine) do
  local id = id_of(ARGV[i])
  redis.call('SET', SAVED .. id, ARGV[i + 1])
  local head = head_of(id)
  if head and not has(head, HAS_SAVED) then
    head.flags = head.flags + HAS_SAVED
    write(id, head)
  end
end
return lost
