//! Placement strategies of coord: pure functions from one shard map to the next
