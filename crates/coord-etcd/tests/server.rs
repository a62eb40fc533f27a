//! What only etcd has, on real servers.

fn main() {}
