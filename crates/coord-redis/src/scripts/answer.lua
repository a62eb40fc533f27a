local tables, requests, answers, ends, events = unpack(KEYS)
local table_name, expected, id, record = unpack(ARGV)
local head = call('HGET', tables, table_name)
if not head or marked(head) ~= expected then
  return {'changed'}
end
if not live(requests, ends, id, now()) or call('HSETNX', answers, id, record) == 0 then
  return {'changed'}
end
say(events, 'request', id, 'answered')
return {'recorded'}
