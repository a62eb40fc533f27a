local leases, ends = unpack(KEYS)
local name, attempt, term, ttl = unpack(ARGV)
local at = now()
local found, rest = live(leases, ends, name, at)
if not found then
  return {'lost'}
end
local held = decoded(found)
if not held then
  return corrupt('the record of the lease is none of ours')
end
if held.attempt ~= attempt or marked(found) ~= term then
  return {'lost', found, rest}
end
-- For the TTL that the record says: it is the one that is told.
call('ZADD', ends, text(at + (lasts(found) or ttl)), name)
return {'renewed', found}
