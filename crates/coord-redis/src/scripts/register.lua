local nodes, ends, clock, events = unpack(KEYS)
local id, record, incarnation, ttl, replace = unpack(ARGV)
local at = now()
local found, rest = live(nodes, ends, id, at)
local what = 'joined'
if found then
  local mark = marked(found)
  local held = decoded(found)
  if not held or not mark or type(held.node) ~= 'table' then
    return corrupt('the record of the node is none of ours')
  end
  if held.node.incarnation == incarnation then
    what = 'updated'
  elseif replace ~= '1' then
    return {'duplicate', found, rest}
  end
end
local mark = tick(clock, at)
if not mark then
  return corrupt('the last term is not a number below 2^52')
end
call('HSET', nodes, id, with_mark('revision', mark, record))
call('ZADD', ends, text(at + ttl), id)
say(events, 'node', id, what, incarnation)
return {'registered', mark}
