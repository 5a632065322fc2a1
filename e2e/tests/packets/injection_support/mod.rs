//! Hostile settings, and what the kernel really holds.

pub mod held;
pub mod hostile;
