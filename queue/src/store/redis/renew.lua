-- Extends leases. ARGV: now, lease in ms, then id and epoch of each claim. Returns the positions
-- (from 0) of those that hold no more.
local ends, leases, lost = clock() + tonumber(ARGV[2]), {}, {}
for i = 3, #ARGV, 2 do
  local head = head_of(ARGV[i])
  if head and head.state == 'r' and head.epoch == tonumber(ARGV[i + 1]) then
    leases[#leases + 1], leases[#leases + 2] = ends, ARGV[i]
  else
    lost[#lost + 1] = (i - 3) / 2
  end
end
many('ZADD', LEASES, leases)
return lost
