local requests, answers, ends, clock, events = unpack(KEYS)
local id, record, limit, most = unpack(ARGV)
local at = now()
if live(requests, ends, id, at) then
  return {'there'}
end
if call('ZCOUNT', ends, '(' .. text(at), '+inf') >= tonumber(most) then
  return {'full'}
end
local mark = tick(clock, at)
if not mark then
  return corrupt('the last term is not a number below 2^52')
end
call('HSET', requests, id, with_mark('revision', mark, record))
call('HDEL', answers, id)
call('ZADD', ends, text(at + limit), id)
say(events, 'request', id, 'submitted')
return {'there'}
