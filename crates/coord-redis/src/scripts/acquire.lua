local leases, ends, names, clock, events = unpack(KEYS)
local name, record, attempt, node, ttl, reclaim = unpack(ARGV)
local at = now()
local found, rest = live(leases, ends, name, at)
if found then
  local held = decoded(found)
  local term = marked(found)
  if not held or not term then
    return corrupt('the record of the lease is none of ours')
  end
  if held.attempt == attempt then
    local again = with_mark('term', term, record)
    if again ~= found then
      call('HSET', leases, name, again)
      say(events, 'lease', name, 'changed', term)
    end
    call('ZADD', ends, text(at + ttl), name)
    return {'acquired', again}
  end
  if reclaim ~= '1' or held.node ~= node then
    return {'held', found, rest}
  end
end
local term = tick(clock, at)
if not term then
  return corrupt('the last term is not a number below 2^52')
end
local taken = with_mark('term', term, record)
call('HSET', leases, name, taken)
call('ZADD', ends, text(at + ttl), name)
call('ZADD', names, 0, name)
say(events, 'lease', name, 'acquired', term)
return {'acquired', taken}
