//! Rules in nf_tables' own form: messages as bytes, expressions, and what they say. Read once; a rule as plans have it is a view of
//! what was read, which fails where a plan could not have said so.
//!
//! In go the attributes of rules; out come what is seen of them ([`seen`]), and rules of plans ([`decode`]). Of tables, chains and transactions
//! it knows nothing: those are for [`netlink`](crate::netlink).

pub(crate) mod abi;
pub(crate) mod decode;
pub(crate) mod expression;
pub(crate) mod reading;
pub(crate) mod seen;
pub(crate) mod wire;
pub(crate) mod xt;
