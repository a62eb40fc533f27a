//! The cluster runtime of coord: membership, election, coordinator
