//! What `scripts/` and tests need beyond cargo, as programs: images and lists of their parts, public interfaces as text, seccomp profiles,
//! the web page. In go the tree and what cargo has built of it, out come files. No program that is shipped knows them.
//!
//! The library itself has nothing but the snippet of the project's README, as a doc test.

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
