//! Limits of the client, against a server that breaks them.

mod limits;
