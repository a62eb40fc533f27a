-- All that live, by name: name, record and how long it has still to live.
local records, ends = unpack(KEYS)
local at, answer = now(), {}
local names = call('ZRANGEBYSCORE', ends, '(' .. text(at), '+inf')
for _, name in ipairs(names) do
  local found, rest = live(records, ends, name, at)
  if found then
    answer[#answer + 1] = name
    answer[#answer + 1] = found
    answer[#answer + 1] = rest
  end
end
return answer
