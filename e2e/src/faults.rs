//! The fault matrix: every kind of fault, put into every operation, one at a time.
//!
//! What is here is pure: the kinds of fault and which system calls each is about ([`Kind`], [`Injection`]), which moments of a run are taken
//! ([`injections`]), the judge of the state after a fault ([`judge()`]), and the table of all cells ([`Table`]). The operations are the tests' own.

mod calls;
mod judge;
mod kind;
mod table;

pub use calls::{injections, noted, spread};
pub use judge::{Ending, Evidence, Facts, FaultResult, is_named, judge};
pub use kind::{Injection, KINDS, Kind};
pub use table::Table;
