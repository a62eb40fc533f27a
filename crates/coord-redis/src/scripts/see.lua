-- A table's head and the lease that a fence speaks of, at one moment.
local tables, leases, ends = unpack(KEYS)
local table_name, lease = unpack(ARGV)
local found = lease ~= '' and live(leases, ends, lease, now())
return {call('HGET', tables, table_name) or '', found or ''}
