//! Conversations with ztunnel.

mod cases;
