//! What the suites of end-to-end tests share: programs, packets, CNI clients, an API server and a node, all of them real. Namespaces and
//! processes are in `test_support`, which serves tests of every crate.
//!
//! From the least to the most powerful:
//!
//! | module | gives a test |
//! |---|---|
//! | [`iptables`] | `istio-iptables`: its runs, recordings, and packets among these and the rules of other programs |
//! | [`plugin`] | `istio-cni`: an invocation as a runtime makes it, and stand-ins for the API server and the agent |
//! | [`validation`] | `istio-validation`: runs without privilege, and verdicts |
//! | [`redirectctl`] | `redirectctl`, and pods that are broken in one way each |
//! | [`agent`], [`pods`] | `install-cni` on the directories of a node, with a stand-in for the API server, and the node's pods |
//! | [`broken`] | pods that exist at an API server only, and whose validation has failed |
//! | [`http`] | requests, for stand-ins that answer them |
//! | [`traffic`] | servers and clients that say where a connection went |
//! | [`cnitool`] | a CNI client that passes exactly what it is reported |
//! | [`kube`] | an API server with etcd, certificates, RBAC and tokens |
//! | [`meddler`] | a process without privilege that does with sockets whatever it likes |
//! | [`envoy`] | a real Envoy as a sidecar |
//! | [`ztunnel`] | a client of ZDS as strict as ztunnel, and a stock ztunnel |
//! | [`segments`] | TCP segments made by hand, and what comes back |
//! | [`killing`] | programs killed at random moments |
//! | [`program`] | the programs under test, built where they are not |
//! | [`strace`] | a program's system calls, noted or made to fail |
//! | [`terminal`] | a terminal: what programs draw on it, its keys and its size |
//! | [`confined`] | a seccomp profile, applied to a program |
//! | [`tools`] | the programs that `scripts/setup-kube.sh` builds |
//! | [`archive`] | what is in archives that programs write |
//! | [`faults`] | the fault matrix: kinds of fault, the judge of the state after an injection, the table |
//! | [`image`] | container images from files, for nodes |
//! | [`node`] | containerd and kubelet, alone or joined to an API server |
//! | [`machine`] | a copy of this machine that may be changed and is thrown away |
//! | [`privileges`] | the table of capabilities that the documents show, to be run |
//! | [`guides`] | the commands that the documents show, to be run |
//!
//! Whatever a value of these modules started or made is gone when the value is dropped, also when the test
//! panics. A test process that is killed takes its processes with it (parent-death signal); the namespaces, folders
//! and cgroups it leaves carry its process id and are removed by the next test process.
//!
//! Everything needs root. Nothing here skips: what cannot run is an error, and errors are [`anyhow::Error`], because the only
//! thing a test does with one is fail and show it.

pub mod agent;
pub mod archive;
pub mod broken;
pub mod cnitool;
pub mod confined;
pub mod envoy;
pub mod faults;
pub mod guides;
pub mod http;
pub mod image;
pub mod iptables;
pub mod killing;
pub mod kube;
pub mod machine;
pub mod meddler;
pub mod net_dirs;
pub mod node;
pub mod plugin;
pub mod pods;
pub mod privileges;
pub mod program;
pub mod redirectctl;
pub mod segments;
pub mod strace;
pub mod terminal;
pub mod tools;
pub mod traffic;
pub mod validation;
pub mod ztunnel;
