//! The suite of behaviours that every coord backend passes
