local leases, ends, names, events = unpack(KEYS)
local name, attempt, term = unpack(ARGV)
local found = live(leases, ends, name, now())
if not found then
  return {'gone'}
end
local held = decoded(found)
if not held then
  return corrupt('the record of the lease is none of ours')
end
if held.attempt ~= attempt or marked(found) ~= term then
  return {'gone'}
end
call('HDEL', leases, name)
call('ZREM', ends, name)
call('ZREM', names, name)
say(events, 'lease', name, 'ended', term)
return {'released'}
