//! Building a redirection: setters, and the one validation that all ways to make one end in.

use super::{
    fields::{Redirect, rows},
    notice,
    parts::{DnsCapture, Families, InboundPorts, InterceptionMode, OutboundRanges, OwnerGroups, Tproxy},
};
use crate::{
    settings::{InputErrors, Key, Source},
    values::{Cidrs, InterfaceName, Mark, MaskedMark, Port, PortRange, Problem},
};
use alloc::{
    string::{String, ToString},
    vec::Vec,
};
use core::{fmt::Display, net::Ipv4Addr};
use ipnet::{IpNet, Ipv4Net};

/// The listener for captured queries, which has no setting.
const DNS_SERVER: &str = "the proxy's DNS server";

/// A redirection in the making. Setters replace what was said before; [`build`](Self::build) checks it all.
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until it is built"]
pub struct RedirectBuilder {
    /// Perhaps not valid yet: it leaves the builder through `validated` alone.
    pub(super) draft: Redirect,
    /// Inbound ports that are not captured where all others are.
    exclude_inbound: Vec<PortRange>,
    caller: Option<Source>,
}

impl Redirect {
    /// The user and the group of the proxy if unset: 1337.
    pub const PROXY_ID: u32 = 1337;

    /// The ports of a sidecar that are never captured inbound: merged metrics (15020), health (15021) and the proxy's own
    /// metrics (15090). [`PodFacts::decide`](crate::pod::PodFacts::decide) adds them to what a pod excludes.
    pub const ALWAYS_EXCLUDED_INBOUND: &[PortRange] =
        &[PortRange::single(15020), PortRange::single(15021), PortRange::single(15090)];
    /// The port of a sidecar that is not captured outbound by default: merged metrics (15020).
    pub const ALWAYS_EXCLUDED_OUTBOUND: &[PortRange] = &[PortRange::single(15020)];

    /// Begins with a sidecar's defaults:
    ///
    /// | what | default |
    /// |---|---|
    /// | inbound TCP | all, to the proxy's port 15006 by REDIRECT |
    /// | but for | 15020, 15021, 15090 ([`ALWAYS_EXCLUDED_INBOUND`]), and 15008 (tunnelled) |
    /// | outbound TCP | all, to the proxy's port 15001 |
    /// | but for | port 15020 ([`ALWAYS_EXCLUDED_OUTBOUND`]) |
    /// | DNS | not captured |
    /// | the proxy | user and group 1337 ([`PROXY_ID`](Redirect::PROXY_ID)) |
    /// | its loopback range | 127.0.0.1/32 |
    ///
    /// [`ALWAYS_EXCLUDED_INBOUND`]: Self::ALWAYS_EXCLUDED_INBOUND
    /// [`ALWAYS_EXCLUDED_OUTBOUND`]: Self::ALWAYS_EXCLUDED_OUTBOUND
    pub fn sidecar(families: Families) -> RedirectBuilder {
        RedirectBuilder { draft: Self::draft(families), exclude_inbound: Vec::new(), caller: None }
    }
}

impl RedirectBuilder {
    /// Says who asks for what is set from here on, so that errors and explanations can name him. Otherwise they name the
    /// setter.
    ///
    /// ```
    /// use redirect_core::{Families, Redirect, settings::Source};
    ///
    /// let errors = Redirect::sidecar(Families::V4)
    ///     .asked_by(Source::Caller("field spec.proxy.uid"))
    ///     .proxy_uids([])
    ///     .build()
    ///     .unwrap_err();
    /// assert!(errors.to_string().starts_with("field spec.proxy.uid: \"\" lists no ID"));
    /// ```
    pub fn asked_by(mut self, source: Source) -> Self {
        self.caller = Some(source);
        self
    }

    /// How inbound connections reach the proxy.
    pub fn mode(mut self, mode: InterceptionMode) -> Self {
        self.draft.mode = mode;
        self.said(&[Key::InterceptionMode, Key::TproxyMark, Key::TproxyRouteTable], "setter mode")
    }

    /// Hands inbound connections to the proxy as they are, with the client's address.
    pub fn tproxy(mut self, tproxy: Tproxy) -> Self {
        self.draft.mode = InterceptionMode::Tproxy(tproxy);
        self.said(&[Key::InterceptionMode, Key::TproxyMark, Key::TproxyRouteTable], "setter tproxy")
    }

    /// The proxy's user and group: one id for both, 0 to 4294967294.
    pub fn proxy_id(self, id: u32) -> Self {
        self.proxy_uids([id]).proxy_gids([id])
    }

    /// The proxy's users: at least one id, each 0 to 4294967294.
    pub fn proxy_uids(mut self, uids: impl IntoIterator<Item = u32>) -> Self {
        self.draft.proxy_uids = uids.into_iter().collect();
        self.said(&[Key::ProxyUid], "setter proxy_uids")
    }

    /// The proxy's groups: at least one id, each 0 to 4294967294.
    pub fn proxy_gids(mut self, gids: impl IntoIterator<Item = u32>) -> Self {
        self.draft.proxy_gids = gids.into_iter().collect();
        self.said(&[Key::ProxyGid], "setter proxy_gids")
    }

    /// Which inbound ports are captured, in place of the default: with [`InboundPorts::AllExcept`], the proxy's own
    /// ([`ALWAYS_EXCLUDED_INBOUND`]) should be among the exceptions. To keep the default and add to its exceptions, use
    /// [`exclude_inbound`](Self::exclude_inbound).
    ///
    /// [`ALWAYS_EXCLUDED_INBOUND`]: Redirect::ALWAYS_EXCLUDED_INBOUND
    pub fn inbound(mut self, inbound: InboundPorts) -> Self {
        self.draft.inbound = inbound;
        self.said(&[Key::InboundPorts, Key::InboundExcludePorts], "setter inbound")
    }

    /// Inbound ports that are not captured, besides those that are not anyway. It counts only where all ports are captured; elsewhere it
    /// has no effect, which is one of the redirection's [notices](Redirect::notices).
    ///
    /// ```
    /// use redirect_core::{Families, InboundPorts, Redirect, values::PortRange};
    ///
    /// let redirect = Redirect::sidecar(Families::V4).exclude_inbound([PortRange::single(22)]).build()?;
    /// let excluded = [15020, 15021, 15090, 22].map(PortRange::single);
    /// assert_eq!(*redirect.inbound(), InboundPorts::AllExcept(excluded.into()));
    /// # Ok::<(), redirect_core::settings::InputErrors>(())
    /// ```
    pub fn exclude_inbound(mut self, ports: impl IntoIterator<Item = PortRange>) -> Self {
        self.exclude_inbound.extend(ports);
        self.said(&[Key::InboundExcludePorts], "setter exclude_inbound")
    }

    /// Outbound ports that are not captured, TCP and UDP, besides those that are not anyway
    /// ([`replace_outbound_exclusions`](Self::replace_outbound_exclusions) changes those).
    pub fn exclude_outbound(mut self, ports: impl IntoIterator<Item = PortRange>) -> Self {
        self.draft.outbound_ports_exclude.extend(ports);
        self.said(&[Key::OutboundExcludePorts], "setter exclude_outbound")
    }

    /// Which destinations are captured.
    pub fn outbound(mut self, outbound: OutboundRanges) -> Self {
        self.draft.outbound = outbound;
        self.said(&[Key::OutboundRanges], "setter outbound")
    }

    /// Which destinations are not captured, whatever [`outbound`](Self::outbound) says.
    pub fn outbound_exclude(mut self, ranges: impl IntoIterator<Item = IpNet>) -> Self {
        self.draft.outbound_exclude = Cidrs::from_iter(ranges);
        self.said(&[Key::OutboundExcludeRanges], "setter outbound_exclude")
    }

    /// Whose outbound traffic is captured: at most [`OwnerGroups::MOST`] groups, each 0 to 4294967294.
    pub fn owner_groups(mut self, groups: OwnerGroups) -> Self {
        self.draft.owner_groups = groups;
        self.said(&[Key::OwnerGroups, Key::OwnerGroupsExclude], "setter owner_groups")
    }

    /// Which DNS queries are captured.
    pub fn dns(mut self, dns: DnsCapture) -> Self {
        self.draft.dns = dns;
        self.said(&[Key::RedirectDns, Key::CaptureAllDns], "setter dns")
    }

    /// The IPv4 loopback range the application may use with itself, inside 127.0.0.0/8; host bits are dropped.
    pub fn loopback(mut self, range: Ipv4Net) -> Self {
        self.draft.loopback = range.trunc();
        self.said(&[Key::LoopbackRange], "setter loopback")
    }

    /// The redirection, if it is valid.
    ///
    /// # Errors
    /// Everything wrong with it, together: an error names its setting ([`InputError::key`]) and what is wrong as data
    /// ([`InputError::problem`]).
    ///
    /// [`InputError::key`]: crate::settings::InputError::key
    /// [`InputError::problem`]: crate::settings::InputError::problem
    ///
    /// ```
    /// use redirect_core::{Families, Redirect, Tproxy, settings::Key, values::{Mark, Port, Problem, RouteTable}};
    ///
    /// let errors = Redirect::sidecar(Families::V4)
    ///     .tproxy(Tproxy::new(Mark::PROXY, RouteTable::new(133).unwrap()))
    ///     .inbound_port(Port::new(15001).unwrap())
    ///     .build()
    ///     .unwrap_err();
    /// let keys: Vec<_> = errors.iter().map(|error| error.key).collect();
    /// assert_eq!(keys, [Some(Key::TproxyMark), Some(Key::InboundCapturePort)]);
    /// assert!(errors.iter().any(|error| error.problem == Problem::ProxyMark));
    /// ```
    pub fn build(mut self) -> Result<Redirect, InputErrors> {
        let without_effect = match &mut self.draft.inbound {
            InboundPorts::AllExcept(except) => {
                except.append(&mut self.exclude_inbound);
                false
            }
            InboundPorts::None | InboundPorts::Only(_) => !self.exclude_inbound.is_empty(),
        };
        let mut redirect = self.draft.validated(InputErrors::default(), |_| None)?;
        let lost = without_effect.then(|| notice::exclusions_without_effect(&redirect));
        redirect.notices.0 = lost.into_iter().chain(notice::of_redirect(&redirect)).collect();
        Ok(redirect)
    }

    /// Notes who asks for these settings.
    pub(super) fn said(mut self, keys: &[Key], setter: &'static str) -> Self {
        let source = self.caller.unwrap_or(Source::Caller(setter));
        for key in keys {
            self.draft.sources.0.set(*key, source);
        }
        self
    }
}

/// Makes a setter of [`RedirectBuilder`] for each row.
macro_rules! setters {
    (
        values { $($(#[doc = $value_doc:literal])+ $value:ident: $value_type:ident = $value_key:ident, $value_default:expr;)+ }
        lists { $($(#[doc = $list_doc:literal])+ $list:ident by $list_setter:ident: $item:ident = $list_key:ident, $list_default:expr;)+ }
    ) => {
        impl RedirectBuilder {
            /// The settings that have a row in `fields`: their setters take values that cannot be wrong. For tests.
            #[doc(hidden)]
            pub const PLAIN: &'static [Key] = &[$(Key::$value_key,)+ $(Key::$list_key,)+];

            $(
                $(#[doc = $value_doc])+
                pub fn $value(mut self, value: $value_type) -> Self {
                    self.draft.$value = value;
                    self.said(&[Key::$value_key], concat!("setter ", stringify!($value)))
                }
            )+

            $(
                $(#[doc = $list_doc])+
                pub fn $list_setter(mut self, values: impl IntoIterator<Item = $item>) -> Self {
                    self.draft.$list = values.into_iter().collect();
                    self.said(&[Key::$list_key], concat!("setter ", stringify!($list_setter)))
                }
            )+
        }
    };
}

rows!(setters);

impl Redirect {
    /// The redirection, unless errors exist already or something is wrong with the whole. `written` returns how
    /// the value of a setting was written.
    pub(super) fn validated<'a>(
        self,
        errors: InputErrors,
        written: impl Fn(Key) -> Option<&'a str>,
    ) -> Result<Self, InputErrors> {
        let mut check = Check { redirect: &self, written, errors };
        check.mark();
        check.listeners();
        check.identity(Key::ProxyUid, &self.proxy_uids);
        check.identity(Key::ProxyGid, &self.proxy_gids);
        check.owner_groups();
        check.dns();
        check.loopback();
        check.errors.into_result(self)
    }
}

/// What has to hold beyond what the types of the parts say. A setting that an error is noted of already is passed over:
/// no source set its value.
struct Check<'a, F> {
    redirect: &'a Redirect,
    written: F,
    errors: InputErrors,
}

impl<'a, F: Fn(Key) -> Option<&'a str>> Check<'_, F> {
    fn refuse(&mut self, key: Key, value: impl Display, problem: Problem) {
        if !self.errors.concern(key) {
            let value = (self.written)(key).map_or_else(|| value.to_string(), String::from);
            self.errors.push_for(key, self.redirect.source(key), &value, problem);
        }
    }

    /// A mark of inbound packets that is taken for another of ours sends packets where they do not belong.
    fn mark(&mut self) {
        let InterceptionMode::Tproxy(tproxy) = self.redirect.mode else { return };
        if let Some(problem) = clash(tproxy.mark(), self.redirect.strict_capture) {
            self.refuse(Key::TproxyMark, tproxy.mark(), problem);
        }
    }

    /// Each listener needs a port of its own. Which one a connection arrives at is the proxy's only way to know what kind it
    /// is; and a connection that arrives at the outbound listener by itself has that listener as its destination, so the
    /// proxy would call itself without end.
    fn listeners(&mut self) {
        let r = self.redirect;
        let dns = (r.dns != DnsCapture::Off).then_some((DNS_SERVER, Key::RedirectDns, DnsCapture::PORT));
        let mut before = [dns, None, None, None];
        for (listener, key, port) in [
            ("--envoy-port", Key::ProxyPort, r.proxy_port),
            ("--inbound-capture-port", Key::InboundCapturePort, r.inbound_port),
            ("--inbound-tunnel-port", Key::InboundTunnelPort, r.tunnel_port),
        ] {
            if self.errors.concern(key) {
                continue;
            }
            if let Some((other, other_key, _)) = before.iter().flatten().find(|(_, _, taken)| *taken == port)
            {
                let is_default = r.source(key) == Source::Default && *other != DNS_SERVER;
                // Only the source of a setting can correct it.
                let (key, other) = if is_default { (*other_key, listener) } else { (key, *other) };
                self.refuse(key, port, Problem::PortTaken(other));
            } else if let Some(free) = before.iter_mut().find(|place| place.is_none()) {
                *free = Some((listener, key, port));
            }
        }
    }

    /// Without the exemption of its own calls, the proxy would get them back.
    fn identity(&mut self, key: Key, ids: &[u32]) {
        if ids.is_empty() {
            self.refuse(key, "", Problem::NoIdentity);
        }
        self.ids(key, ids);
    }

    /// The largest id means "no id" to the kernel.
    fn ids(&mut self, key: Key, ids: &[u32]) {
        if ids.contains(&u32::MAX) {
            let problem = Problem::OutOfRange { what: "ids", min: 0, max: u32::MAX.saturating_sub(1) };
            self.refuse(key, u32::MAX, problem);
        }
    }

    fn owner_groups(&mut self) {
        let redirect = self.redirect;
        match &redirect.owner_groups {
            OwnerGroups::AllExcept(groups) => self.ids(Key::OwnerGroupsExclude, groups),
            OwnerGroups::Only(groups) => {
                self.ids(Key::OwnerGroups, groups);
                if groups.len() > OwnerGroups::MOST {
                    let texts: Vec<String> = groups.iter().map(ToString::to_string).collect();
                    let problem = Problem::TooMany { found: groups.len(), most: OwnerGroups::MOST };
                    self.refuse(Key::OwnerGroups, texts.join(","), problem);
                }
            }
        }
    }

    fn dns(&mut self) {
        if matches!(&self.redirect.dns, DnsCapture::Servers(servers) if servers.is_empty()) {
            self.refuse(Key::RedirectDns, "", Problem::NoServer);
        }
    }

    fn loopback(&mut self) {
        let range = self.redirect.loopback;
        if !is_loopback(&range) {
            self.refuse(Key::LoopbackRange, range, Problem::NotLoopback);
        }
    }
}

/// Whether a range lies inside 127.0.0.0/8.
fn is_loopback(range: &Ipv4Net) -> bool {
    Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8).contains(range)
}

/// The mark of ours that a mark of inbound packets would be taken for.
fn clash(mark: Mark, strict: bool) -> Option<Problem> {
    if mark == Mark::PROXY {
        Some(Problem::ProxyMark)
    } else if strict && MaskedMark::GUARD.beside(mark).is_none() {
        Some(Problem::GuardMark(MaskedMark::GUARD))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        pod::{Decision, PodFacts},
        settings::{NamespaceFacts, RawSettings},
        values::RouteTable,
    };
    use core::net::IpAddr;

    fn problems(builder: RedirectBuilder) -> Vec<(Option<Key>, Problem)> {
        let errors = builder.build().unwrap_err();
        errors.iter().map(|error| (error.key, error.problem.clone())).collect()
    }

    fn sidecar() -> RedirectBuilder {
        Redirect::sidecar(Families::V4)
    }

    fn port(number: u16) -> Port {
        Port::new(number).unwrap()
    }

    #[test]
    fn a_sidecar_is_what_the_table_and_a_pod_that_says_nothing_ask_for() {
        for families in [Families::V4, Families::Both] {
            let addresses: [IpAddr; 1] = match families {
                Families::V4 => ["10.1.0.2".parse().unwrap()],
                Families::Both => ["fd00::2".parse().unwrap()],
            };
            let facts = NamespaceFacts::new(&addresses);
            let built = Redirect::sidecar(families).build().unwrap();
            assert_eq!(Redirect::parse(&RawSettings::for_pod(), &facts), Ok(built.clone()));
            let decided = PodFacts::sidecar([("a", "b")]).decide(&facts).unwrap();
            assert_eq!(decided, Decision::Redirect(built.clone().into()));
        }
    }

    #[test]
    fn two_listeners_on_one_port_are_refused() {
        let taken = |other| Problem::PortTaken(other);
        let cases = [
            (sidecar().proxy_port(port(15006)), Key::ProxyPort, taken("--inbound-capture-port")),
            (sidecar().inbound_port(port(15001)), Key::InboundCapturePort, taken("--envoy-port")),
            (sidecar().tunnel_port(port(15001)), Key::InboundTunnelPort, taken("--envoy-port")),
            (sidecar().inbound_port(port(15008)), Key::InboundCapturePort, taken("--inbound-tunnel-port")),
            (sidecar().dns(DnsCapture::All).proxy_port(DnsCapture::PORT), Key::ProxyPort, taken(DNS_SERVER)),
        ];
        for (builder, key, problem) in cases {
            assert_eq!(problems(builder), [(Some(key), problem)]);
        }
        assert!(
            sidecar().proxy_port(DnsCapture::PORT).build().is_ok(),
            "where no query is captured, nothing listens there"
        );
        let swapped = sidecar().proxy_port(port(15006)).inbound_port(port(15001));
        assert!(swapped.build().is_ok());
    }

    #[test]
    fn a_proxy_without_identity_is_refused() {
        assert_eq!(problems(sidecar().proxy_uids([])), [(Some(Key::ProxyUid), Problem::NoIdentity)]);
        assert_eq!(problems(sidecar().proxy_gids([])), [(Some(Key::ProxyGid), Problem::NoIdentity)]);
        let [(key, problem)] = problems(sidecar().proxy_gids([7, u32::MAX])).try_into().unwrap();
        assert_eq!(key, Some(Key::ProxyGid));
        assert!(matches!(problem, Problem::OutOfRange { max: 4_294_967_294, .. }), "{problem:?}");
    }

    #[test]
    fn marks_of_ours_are_refused() {
        let tproxy = |mark| {
            let mark = Mark::new(mark).unwrap();
            sidecar().tproxy(Tproxy::new(mark, RouteTable::new(7).unwrap()))
        };
        assert_eq!(problems(tproxy(1338)), [(Some(Key::TproxyMark), Problem::ProxyMark)]);
        let guarded = tproxy(0x10_0000).strict_capture(true);
        assert_eq!(problems(guarded), [(Some(Key::TproxyMark), Problem::GuardMark(MaskedMark::GUARD))]);
        assert!(tproxy(0x10_0000).build().is_ok() && tproxy(0x539).strict_capture(true).build().is_ok());
    }

    #[test]
    fn lists_that_say_nothing_or_too_much_are_refused() {
        let no_server = sidecar().dns(DnsCapture::Servers(Vec::new()));
        assert_eq!(problems(no_server), [(Some(Key::RedirectDns), Problem::NoServer)]);
        let groups = |count: u32| sidecar().owner_groups(OwnerGroups::Only((0..count).collect()));
        assert!(groups(64).build().is_ok());
        let too_many = Problem::TooMany { found: 65, most: 64 };
        assert_eq!(problems(groups(65)), [(Some(Key::OwnerGroups), too_many)]);
        let nobody = sidecar().owner_groups(OwnerGroups::AllExcept([u32::MAX].into()));
        assert_eq!(problems(nobody)[0].0, Some(Key::OwnerGroupsExclude));
    }

    #[test]
    fn a_loopback_range_is_one_of_loopback_and_has_no_host_bits() {
        let outside = sidecar().loopback("10.0.0.0/8".parse().unwrap());
        assert_eq!(problems(outside), [(Some(Key::LoopbackRange), Problem::NotLoopback)]);
        let wider = sidecar().loopback("127.0.0.0/7".parse().unwrap());
        assert_eq!(problems(wider), [(Some(Key::LoopbackRange), Problem::NotLoopback)]);
        let built = sidecar().loopback("127.1.2.3/8".parse().unwrap()).build().unwrap();
        assert_eq!(built.loopback(crate::Family::V4), "127.0.0.0/8".parse::<IpNet>().unwrap());
    }

    #[test]
    fn all_errors_are_told_together_and_by_who_said_it() {
        let errors = sidecar()
            .proxy_uids([])
            .asked_by(Source::Caller("field spec.ports.inbound"))
            .inbound_port(port(15001))
            .build()
            .unwrap_err();
        assert_eq!(
            errors.to_string(),
            "field spec.ports.inbound: \"15001\" is the port of --envoy-port as well; the proxy cannot distinguish the two kinds \
             of connections; setter proxy_uids: \"\" lists no ID; without an exempt ID, the proxy's calls \
             would be sent back to it"
        );
    }

    #[test]
    fn who_asked_for_a_rule_stays_with_it_and_makes_no_difference() {
        let plan = |source| {
            let builder = sidecar().asked_by(source).exclude_interfaces(["eth1".parse().unwrap()]);
            builder.build().unwrap().plan()
        };
        let (by_flag, by_annotation) = (plan(Source::Flag("f")), plan(Source::Annotation("a")));
        assert_eq!(by_flag, by_annotation);
        let source = |plan: &crate::RulePlan, key| {
            plan.planned_rules()
                .iter()
                .find(|rule| rule.setting() == key)
                .map(crate::plan::PlannedRule::source)
        };
        assert_eq!(source(&by_flag, Key::ExcludeInterfaces), Some(Source::Flag("f")));
        assert_eq!(source(&by_annotation, Key::ExcludeInterfaces), Some(Source::Annotation("a")));
        assert_eq!(source(&by_annotation, Key::ProxyPort), Some(Source::Default));
    }
}
