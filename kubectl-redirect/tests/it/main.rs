//! The program with a stand-in for the API server, its schema, and what it is linked with.

mod access;
mod agents;
mod cleanup;
mod dependencies;
mod limits;
mod schema;
mod server;
mod trial;
mod watch;
