-- The reserved table's head, a request and its answer, at one moment.
local tables, requests, answers, ends = unpack(KEYS)
local table_name, id = unpack(ARGV)
local found = live(requests, ends, id, now())
local answer = found and call('HGET', answers, id)
return {call('HGET', tables, table_name) or '', found or '', answer or ''}
