-- Tries each command that the scripts use, on keys of its own, and names those that are refused.
local text_key, hash, sorted, stream = unpack(KEYS)
local refused = {}
local function try(command, ...)
  local answer = redis.pcall(command, ...)
  if type(answer) == 'table' and answer.err then
    refused[#refused + 1] = command
    refused[#refused + 1] = answer.err
  end
  return answer
end
try('TIME')
try('SET', text_key, 'check')
local read = try('GET', text_key)
try('HSET', hash, 'field', 'check')
try('HSETNX', hash, 'other', 'check')
try('HGET', hash, 'field')
try('HKEYS', hash)
try('HDEL', hash, 'field')
try('ZADD', sorted, 1, 'member')
try('ZSCORE', sorted, 'member')
try('ZCOUNT', sorted, '-inf', '+inf')
try('ZRANGE', sorted, 0, 0, 'WITHSCORES')
try('ZRANGEBYSCORE', sorted, '-inf', '+inf')
try('ZRANGEBYLEX', sorted, '-', '+')
try('ZREM', sorted, 'member')
try('XADD', stream, 'MAXLEN', '~', 10, '*', 'field', 'check')
try('XRANGE', stream, '-', '+', 'COUNT', 1)
try('XREVRANGE', stream, '+', '-', 'COUNT', 1)
for _, key in ipairs(KEYS) do
  try('PEXPIRE', key, 10000)
end
return {read == 'check' and 'read' or 'unread', unpack(refused)}
