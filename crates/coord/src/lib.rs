//! Who is alive, who leads, who owns which shard: coordination over the store you already run
