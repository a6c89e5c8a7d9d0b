-- Extends leases. ARGV: now, lease in ms, then id and epoch of each claim. Returns the positions
-- (from 0) of those that hold no more.
local ends, leases = text(clock() + ARGV[2]), {}
local mine, lost = held(3, 2)
for n, i in ipairs(mine) do
  leases[2 * n - 1], leases[2 * n] = ends, claim_of(ARGV[i], ARGV[i + 1])
end
many('ZADD', LEASES, leases)
return lost
