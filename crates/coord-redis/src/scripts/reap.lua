-- Ends what has run out and tells the watches, whoever comes first. Answers whether events are missing
-- after the one that was read last, which the newest is, and when the next entry runs out.
local leases, lease_ends, names, nodes, node_ends, requests, answers, request_ends, events = unpack(KEYS)
local last = ARGV[1]
local at = now()
local function due(ends)
  return call('ZRANGEBYSCORE', ends, '-inf', text(at), 'LIMIT', 0, 100)
end
for _, name in ipairs(due(lease_ends)) do
  local found = call('HGET', leases, name)
  call('HDEL', leases, name)
  call('ZREM', lease_ends, name)
  call('ZREM', names, name)
  say(events, 'lease', name, 'ended', found and marked(found) or '')
end
for _, id in ipairs(due(node_ends)) do
  local found = call('HGET', nodes, id)
  local held = found and decoded(found)
  local node = held and type(held.node) == 'table' and held.node.incarnation or ''
  call('HDEL', nodes, id)
  call('ZREM', node_ends, id)
  say(events, 'node', id, 'expired', node)
end
for _, id in ipairs(due(request_ends)) do
  call('HDEL', requests, id)
  call('HDEL', answers, id)
  call('ZREM', request_ends, id)
  say(events, 'request', id, 'gone')
end
local next_end = -1
for _, ends in ipairs({lease_ends, node_ends, request_ends}) do
  local first = call('ZRANGE', ends, 0, 0, 'WITHSCORES')
  local rest = first[2] and math.max(tonumber(first[2]) - at, 0)
  if rest and (next_end < 0 or rest < next_end) then
    next_end = rest
  end
end
local missing = '0'
if last ~= '' and last ~= '0-0' and #call('XRANGE', events, last, last) == 0 then
  missing = '1'
end
local newest = call('XREVRANGE', events, '+', '-', 'COUNT', 1)
return {missing, newest[1] and newest[1][1] or '0-0', text(next_end)}
