-- Ends the registration of an incarnation: its own, or, where a revision is named, another's that
-- nobody has written since.
local nodes, ends, events = unpack(KEYS)
local id, incarnation, revision = unpack(ARGV)
local found, rest = live(nodes, ends, id, now())
if not found then
  return {'gone'}
end
local mark = marked(found)
local held = decoded(found)
if not held or not mark or type(held.node) ~= 'table' then
  return corrupt('the record of the node is none of ours')
end
if held.node.incarnation ~= incarnation or (revision ~= '' and revision ~= mark) then
  return {'alive', found, rest}
end
call('HDEL', nodes, id)
call('ZREM', ends, id)
say(events, 'node', id, 'left', incarnation)
return {'removed'}
