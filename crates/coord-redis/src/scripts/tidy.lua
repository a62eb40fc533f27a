-- Removes chunks while the head is the one that was written last.
local tables, chunks = unpack(KEYS)
local found = call('HGET', tables, ARGV[1])
if not found or marked(found) ~= ARGV[2] then
  return {'changed'}
end
for index = 3, #ARGV do
  call('HDEL', chunks, ARGV[index])
end
return {'removed'}
