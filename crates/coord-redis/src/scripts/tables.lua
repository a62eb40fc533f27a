-- The names of all tables.
return call('HKEYS', KEYS[1])
