//! Ambient mode: pods without a sidecar, which the node's ztunnel serves.
//!
//! A pod is enrolled when its rules are as planned, ztunnel has acknowledged it, and its addresses are among those whose probes are let
//! through. [`decision`] compares that with the pod's settings, and is pure; [`enrolment`] takes its steps. [`node`]
//! does what they say, and [`rules`](crate::ambient_rules) acts in a pod's network namespace.

pub mod decision;
pub mod enrolment;
pub mod node;
pub mod pod;
