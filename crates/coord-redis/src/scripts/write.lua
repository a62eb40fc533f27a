-- Writes a head in the place of the one that was read, if the lease is still held.
local tables, leases, ends, clock, events = unpack(KEYS)
local table_name, expected, record, lease, attempt, term = unpack(ARGV)
local at = now()
local found = call('HGET', tables, table_name)
local mark = found and marked(found) or ''
if mark ~= expected or (found and mark == '') then
  return {'changed'}
end
if lease ~= '' then
  local grant = live(leases, ends, lease, at)
  local held = grant and decoded(grant)
  if not held or held.attempt ~= attempt or marked(grant) ~= term then
    return {'changed'}
  end
end
mark = tick(clock, at)
if not mark then
  return corrupt('the last term is not a number below 2^52')
end
call('HSET', tables, table_name, with_mark('revision', mark, record))
say(events, 'table', table_name, 'written')
return {'written', mark}
