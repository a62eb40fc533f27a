local nodes, ends, clock, events = unpack(KEYS)
local id, record, incarnation, ttl = unpack(ARGV)
local at = now()
local found, rest = live(nodes, ends, id, at)
if not found then
  return {'gone'}
end
local mark = marked(found)
local held = decoded(found)
if not held or not mark or type(held.node) ~= 'table' then
  return corrupt('the record of the node is none of ours')
end
if held.node.incarnation ~= incarnation then
  return {'superseded', found, rest}
end
mark = tick(clock, at)
if not mark then
  return corrupt('the last term is not a number below 2^52')
end
call('HSET', nodes, id, with_mark('revision', mark, record))
call('ZADD', ends, text(at + ttl), id)
say(events, 'node', id, 'updated', incarnation)
return {'renewed', mark}
