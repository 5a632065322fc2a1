//! Settings to plans, as a user of the library sees them.

mod capture;
mod coverage;
mod dependencies;
mod examples;
mod generated;
mod linked;
mod running;
mod walk;
