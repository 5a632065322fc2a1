//! The snippet of the project's README, as a doc test.

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
