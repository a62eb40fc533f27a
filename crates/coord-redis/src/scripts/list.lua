-- At most so many leases after a name, by the order of their bytes: name, record and rest.
local leases, ends, names = unpack(KEYS)
local after, limit = ARGV[1], tonumber(ARGV[2])
local at, answer, count = now(), {}, 0
local from = after == '' and '-' or '(' .. after
while count < limit do
  local page = call('ZRANGEBYLEX', names, from, '+', 'LIMIT', 0, limit)
  for _, name in ipairs(page) do
    local found, rest = live(leases, ends, name, at)
    if found and count < limit then
      count = count + 1
      answer[#answer + 1] = name
      answer[#answer + 1] = found
      answer[#answer + 1] = rest
    end
    from = '(' .. name
  end
  if #page < limit then
    break
  end
end
return answer
