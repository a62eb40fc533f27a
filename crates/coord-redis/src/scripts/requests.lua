-- Requests with their answers: those that are named, or all. Id, request and answer.
local requests, answers, ends = unpack(KEYS)
local at, answer, ids = now(), {}, ARGV
if #ids == 0 then
  ids = call('ZRANGEBYSCORE', ends, '(' .. text(at), '+inf')
end
for _, id in ipairs(ids) do
  local found = live(requests, ends, id, at)
  answer[#answer + 1] = id
  answer[#answer + 1] = found or ''
  answer[#answer + 1] = found and call('HGET', answers, id) or ''
end
return answer
