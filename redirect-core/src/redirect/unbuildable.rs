//! What cannot be built through the public interface: each attempt does not compile, and has a twin beside it that differs
//! in that alone and does. What the types cannot refuse, [`RedirectBuilder::build`](crate::RedirectBuilder::build) does;
//! the tests beside it show that.

/// A redirection is not written down field by field.
/// ```compile_fail
/// use redirect_core::{Families, Redirect};
/// let valid = Redirect::sidecar(Families::V4).build().unwrap();
/// let invalid = Redirect { proxy_uids: vec![], ..valid };
/// ```
/// ```
/// use redirect_core::{Families, Redirect};
/// let valid = Redirect::sidecar(Families::V4).build().unwrap();
/// let Redirect { .. } = valid;
/// ```
pub struct Literal;

/// The parts of one that exists are read and not changed.
/// ```compile_fail
/// use redirect_core::{Families, Redirect};
/// let mut redirect = Redirect::sidecar(Families::V4).build().unwrap();
/// redirect.inbound_port = redirect.proxy_port();
/// ```
/// ```
/// use redirect_core::{Families, Redirect};
/// let mut redirect = Redirect::sidecar(Families::V4).build().unwrap();
/// assert_ne!(redirect.inbound_port(), redirect.proxy_port());
/// ```
/// ```compile_fail
/// use redirect_core::{Families, Redirect};
/// let mut redirect = Redirect::sidecar(Families::V4).build().unwrap();
/// redirect.proxy_uids().clear();
/// ```
/// ```
/// use redirect_core::{Families, Redirect};
/// let mut redirect = Redirect::sidecar(Families::V4).build().unwrap();
/// redirect.proxy_uids().len();
/// ```
/// ```compile_fail
/// use redirect_core::{Families, InboundPorts, Redirect};
/// let mut redirect = Redirect::sidecar(Families::V4).build().unwrap();
/// *redirect.inbound() = InboundPorts::None;
/// ```
/// ```
/// use redirect_core::{Families, InboundPorts, Redirect};
/// let mut redirect = Redirect::sidecar(Families::V4).inbound(InboundPorts::None).build().unwrap();
/// assert_eq!(*redirect.inbound(), InboundPorts::None);
/// ```
pub struct ChangeExample;

/// A builder gives its redirection away only when it is built.
/// ```compile_fail
/// use redirect_core::{Families, Redirect};
/// let redirect: Redirect = Redirect::sidecar(Families::V4).proxy_uids([]).draft;
/// ```
/// ```
/// use redirect_core::{Families, Redirect};
/// assert!(Redirect::sidecar(Families::V4).proxy_uids([]).build().is_err());
/// ```
/// ```compile_fail
/// use redirect_core::{Families, Redirect};
/// let plan = Redirect::sidecar(Families::V4).plan();
/// ```
/// ```
/// use redirect_core::{Families, Redirect};
/// let plan = Redirect::sidecar(Families::V4).build().unwrap().plan();
/// ```
/// ```compile_fail
/// let redirect = redirect_core::Redirect::default();
/// ```
/// ```compile_fail
/// let builder = redirect_core::RedirectBuilder::default();
/// ```
/// ```
/// let builder = redirect_core::Redirect::sidecar(redirect_core::Families::V4);
/// ```
pub struct Unfinished;

/// A mark of 0 does not exist.
/// ```compile_fail
/// let mark = redirect_core::values::Mark(0);
/// ```
/// ```compile_fail
/// let mark: redirect_core::values::Mark = 0_u32.into();
/// ```
/// ```compile_fail
/// let mark = redirect_core::values::Mark::known(0);
/// ```
/// ```
/// assert!(redirect_core::values::Mark::new(0).is_none() && redirect_core::values::Mark::new(1).is_some());
/// ```
pub struct NoMark;

/// Port 0, a backward port range, one of the kernel's own tables or an invalid name cannot be built.
/// ```compile_fail
/// let port = redirect_core::values::Port(0);
/// ```
/// ```compile_fail
/// let range = redirect_core::values::PortRange { first: 2, last: 1 };
/// ```
/// ```compile_fail
/// let table = redirect_core::values::RouteTable(255);
/// ```
/// ```compile_fail
/// let name = redirect_core::values::InterfaceName { name: "a b".to_owned(), prefix: false };
/// ```
/// ```
/// use redirect_core::values::{InterfaceName, Port, PortRange, RouteTable};
/// assert!(Port::new(0).is_none() && Port::new(1).is_some());
/// assert!(PortRange::new(2, 1).is_none() && PortRange::new(1, 2).is_some());
/// assert!(RouteTable::new(255).is_none() && RouteTable::new(133).is_some());
/// assert!("a b".parse::<InterfaceName>().is_err() && "eth0".parse::<InterfaceName>().is_ok());
/// ```
pub struct NoValue;

/// TPROXY's routing is made of checked parts.
/// ```compile_fail
/// use redirect_core::{Tproxy, values::{Mark, RouteTable}};
/// let tproxy = Tproxy { mark: Mark::new(1).unwrap(), table: RouteTable::new(133).unwrap() };
/// ```
/// ```compile_fail
/// use redirect_core::{Tproxy, values::{Mark, RouteTable}};
/// let tproxy = Tproxy::new(1, 133);
/// ```
/// ```
/// use redirect_core::{Tproxy, values::{Mark, RouteTable}};
/// let tproxy = Tproxy::new(Mark::new(1).unwrap(), RouteTable::new(133).unwrap());
/// ```
pub struct NoTproxy;

/// Ranges lose their host bits on the only way in.
/// ```compile_fail
/// use redirect_core::values::Cidrs;
/// let mut ranges = Cidrs::new();
/// ranges.v4.push("10.1.2.3/8".parse().unwrap());
/// ```
/// ```
/// use redirect_core::values::Cidrs;
/// let mut ranges = Cidrs::new();
/// ranges.push("10.1.2.3/8".parse().unwrap());
/// assert_eq!(ranges.iter().next(), "10.0.0.0/8".parse().ok());
/// ```
pub struct NoHostBits;

/// A planned rule, and a plan's routing, come from a plan.
/// ```compile_fail
/// use redirect_core::{Families, Redirect, plan::PlannedRule};
/// let plan = Redirect::sidecar(Families::V4).build().unwrap().plan();
/// let mut rule = plan.planned_rules()[0].clone();
/// rule.purpose = "another";
/// ```
/// ```
/// use redirect_core::{Families, Redirect, plan::PlannedRule};
/// let plan = Redirect::sidecar(Families::V4).build().unwrap().plan();
/// let mut rule = plan.planned_rules()[0].clone();
/// rule.purpose();
/// ```
/// ```compile_fail
/// let plan = redirect_core::RulePlan { rules: vec![], families: vec![], policy_routes: None };
/// ```
/// ```
/// let plan = redirect_core::RulePlan::empty();
/// ```
pub struct NoPlan;
