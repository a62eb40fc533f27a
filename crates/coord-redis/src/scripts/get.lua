-- What stands under each of the names: the record, or an empty text, and how long it has still to live.
local records, ends = unpack(KEYS)
local at, answer = now(), {}
for _, name in ipairs(ARGV) do
  local found, rest = live(records, ends, name, at)
  answer[#answer + 1] = found or ''
  answer[#answer + 1] = rest
end
return answer
