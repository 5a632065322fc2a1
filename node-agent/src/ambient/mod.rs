//! Ambient mode: pods without a sidecar, which the node's ztunnel serves.
//!
//! A pod is enrolled when its rules are as planned, ztunnel has acknowledged it, and its addresses are among those whose probes are let
//! through. [`decision`] compares that with the pod's settings, and is pure; [`enrolment`] takes its steps. [`node`]
//! does what they say, and [`rules`](crate::ambient_rules) acts in a pod's network namespace. [`controller`] is the task that decides when: it learns of pods from
//! the API server ([`inventory`]), of those that are being created from plugins ([`add_event`]), and of changed rules from the kernel ([`monitor`]).

pub mod add_event;
pub mod annotations;
pub mod controller;
pub mod decision;
pub mod enrolment;
pub mod inventory;
pub mod monitor;
pub mod node;
pub mod pod;
pub mod state;
