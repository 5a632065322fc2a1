//! What `scripts/` and tests need beyond cargo, as programs: images and lists of their parts, public interfaces as text, seccomp profiles,
//! the web page. In go the tree and what cargo has built of it, out come files. No program that is shipped knows them.
//!
//! Each program is a module, which says what it is for; the snippet of the project's README is a doc test.

pub mod image;
pub mod modules;
pub mod seccomp;
pub mod suite;

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
