//! What does not compile.
