//! What tests at every height need: throw-away network namespaces, processes, ports, threads.
//!
//! | module | gives a test |
//! |---|---|
//! | [`netns`] | network namespaces that are gone with the value, and what the kernel holds in them |
//! | [`process`] | commands, waiting with patience, servers in the background |
//! | [`parallel`] | work on a few threads, or on one of its own until the test ends it |
//! | [`port`] | ports of loopback that no other process has |
//! | [`project`] | the project's documents and manifests |
//! | [`dice`] | numbers that look random and are the same every time |
//! | [`rewrites`] | what this project writes otherwise than was recorded |
//! | [`sample`] | a sample of the recordings, where machines are slow; numbers from the environment |
//! | [`saved_rules`] | what iptables-save printed on real nodes and in real pods |
//! | [`leftovers`] | names that show their owner, by which another test removes what is left of a killed one |
//!
//! Whatever a value of these modules started or made is gone when the value is dropped, also when the test panics. A test process that is
//! killed takes its processes with it (parent-death signal); the namespaces, folders and cgroups it leaves carry its process id and are
//! removed by the next test process.
//!
//! Everything needs root. Nothing here skips: what cannot run is an error, and errors are [`anyhow::Error`], because the only thing a test
//! does with one is fail and show it. It depends on nothing of the project: every crate's tests may use it.

pub mod dice;
pub mod leftovers;
pub mod netns;
pub mod parallel;
pub mod port;
pub mod process;
pub mod project;
pub mod rewrites;
pub mod sample;
pub mod saved_rules;
