//! Both taint controllers of the real program, and an API server that fails: they recover by themselves, do nothing twice, never free a node wrongly, and
//! log that.

mod broken;
mod controllers;
mod pods;
mod process;
