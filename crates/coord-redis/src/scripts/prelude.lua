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

-- How long an entry has still to live; none if it has ended.
local function left(ends, name, at)
  local score = call('ZSCORE', ends, name)
  local rest = score and tonumber(score) - at
  return rest and rest > 0 and rest or nil
end

local function live(records, ends, name, at)
  local rest = left(ends, name, at)
  local found = rest and call('HGET', records, name)
  if found then
    return found, text(rest)
  end
  return false, ''
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
