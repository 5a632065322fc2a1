//! What the tools make, and the checks of documents.

#[path = "../../src/page/contents.rs"]
mod contents;
mod images;
mod interrupted;
mod links;
mod named_tests;
mod page_contents;
mod release_candidate;
mod seccomp_profile;
