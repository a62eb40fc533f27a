//! Servers, faults and failure scenarios for the tests of coord.
