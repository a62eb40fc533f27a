//! Examples of coord, each runnable with no server.
