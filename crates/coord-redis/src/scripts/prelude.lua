-- What all scripts begin with. All times are microseconds by this server's clock.

-- Runs a command. Older servers don't say which one it was that the user may not run.
local function call(command, ...)
  local answer = redis.pcall(command, ...)
  if type(answer) ~= 'table' or not answer.err then
    return answer
  end
  if string.find(answer.err, 'permission') or string.find(answer.err, "user executing the script can't") then
    error('NOPERM the user may not run ' .. command .. ': ' .. answer.err)
  end
  return redis.call(command, ...)
end

-- Which store the caller means, behind all other keys and arguments; empty before it knows. A server that
-- was emptied is given its identity back by whoever comes first, so that all go on together. One that got
-- another identity meanwhile is another store: nothing is done there.
local identity, identity_key = table.remove(ARGV), table.remove(KEYS)
if identity ~= '' then
  local found = call('GET', identity_key)
  if not found then
    redis.pcall('SET', identity_key, identity)
  elseif found ~= identity then
    return redis.error_reply('IDENTITY it is ' .. found .. ', not ' .. identity)
  end
end

local function now()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- A number as its decimal digits: Lua itself writes large ones with an exponent.
local function text(number)
  return string.format('%.0f', number)
end

-- A mark greater than all before it, also if the last one was lost; none if the last one is no mark.
local function tick(clock, at)
  local mark, last = at, call('GET', clock)
  if last then
    last = tonumber(last)
    if not last or last < 0 or last >= 4503599627370495 then
      return nil
    end
    mark = math.max(at, last + 1)
  end
  call('SET', clock, text(mark))
  return text(mark)
end

-- How long a record lives that is not renewed, by what it says itself.
local function lasts(record)
  local millis = string.match(record, '"ttl_ms":(%d+)') or string.match(record, '"time_limit_ms":(%d+)')
  return millis and millis * 1000
end

-- A record that has not ended, and how long it has still to live. An end that is further away than the
-- record may live was written while this server's clock was fast: it counts from now on.
local function live(records, ends, name, at)
  local score = call('ZSCORE', ends, name)
  local rest = score and tonumber(score) - at
  local found = rest and rest > 0 and call('HGET', records, name)
  if not found then
    return false, ''
  end
  local most = lasts(found)
  if most and rest > most then
    rest = most
    -- Who may only read has to leave the end to others.
    redis.pcall('ZADD', ends, text(at + most), name)
  end
  return found, text(rest)
end

local function decoded(record)
  local read, value = pcall(cjson.decode, record)
  return read and type(value) == 'table' and value or nil
end

-- The mark that a record begins with, and what follows it.
local function marked(record)
  local mark, body = string.match(record, '^{"term":(%d+),(.*)$')
  if not mark then
    mark, body = string.match(record, '^{"revision":(%d+),(.*)$')
  end
  return mark, body
end

local function with_mark(field, mark, record)
  return '{"' .. field .. '":' .. mark .. ',' .. string.sub(record, 2)
end

-- Wakes the watches. They read for themselves what has changed.
local function say(events, kind, name, what, about)
  call('XADD', events, 'MAXLEN', '~', 10000, '*', 'kind', kind, 'name', name, 'what', what, 'about', about or '')
end

local function corrupt(what)
  return redis.error_reply('CORRUPT ' .. what)
end
