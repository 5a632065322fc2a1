//! The words a redirection is made of. Each is parsed once, at the edge; a value that exists is valid.

use alloc::{
    string::{String, ToString},
    vec::Vec,
};
use core::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::{NonZeroU16, NonZeroU32},
    str::FromStr,
};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// An address family: which of `iptables` and `ip6tables` a rule belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum Family {
    /// IPv4.
    #[cfg_attr(feature = "serde", serde(rename = "IPv4"))]
    V4,
    /// IPv6.
    #[cfg_attr(feature = "serde", serde(rename = "IPv6"))]
    V6,
}

impl Family {
    /// Both families, in the order in which they are programmed.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];
    /// The pass-through source address of the proxy's inbound connections to the application: 127.0.0.6.
    pub const PASSTHROUGH_V4: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 6);
    /// The pass-through source address of the proxy's inbound connections to the application: `::6`.
    pub const PASSTHROUGH_V6: Ipv6Addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6);

    /// The family of an address.
    #[must_use]
    pub const fn of(address: &IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// The pass-through source address of this family.
    #[must_use]
    pub const fn passthrough(self) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(Self::PASSTHROUGH_V4),
            Self::V6 => IpAddr::V6(Self::PASSTHROUGH_V6),
        }
    }

    /// Its number in the kernel's messages (`NFPROTO_IPV4` and `AF_INET`, or `NFPROTO_IPV6` and `AF_INET6`).
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::V4 => 2,
            Self::V6 => 10,
        }
    }

    /// The address with this number, as the kernel's sets hold it.
    #[must_use]
    pub fn address(self, number: u128) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(u32::try_from(number).map_or(Ipv4Addr::BROADCAST, Ipv4Addr::from)),
            Self::V6 => IpAddr::V6(Ipv6Addr::from(number)),
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// Why a word could not be read. Says what is wrong and what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// Not a whole number.
    #[error("is not a whole number")]
    NotANumber,
    /// A leading zero: octal to some readers, decimal to others.
    #[error("has a leading zero, which some tools read as octal; write the number without it")]
    LeadingZero,
    /// Outside the range of the thing.
    #[error("is out of range; {what} are {min} to {max}")]
    OutOfRange {
        /// What kind of number it is, in the plural.
        what: &'static str,
        /// Smallest valid value.
        min: u32,
        /// Largest valid value.
        max: u32,
    },
    /// A range whose end lies before its start.
    #[error("is a range that ends before it starts")]
    BackwardRange,
    /// An empty element in a list that must not have one.
    #[error("is empty; remove the stray comma")]
    EmptyElement,
    /// A range of ports written with a dash where a colon belongs.
    #[error("is not a whole number; a range is written {0}")]
    DashRange(String),
    /// `*` inside a list.
    #[error("stands for everything, so it must be the only value")]
    StarInList,
    /// `*` where a list is needed.
    #[error("is not allowed here; list the values")]
    StarNotAllowed,
    /// `*` in an exclusion list.
    #[error("excludes everything; to capture nothing, leave the include list empty")]
    StarExcludes,
    /// An address without a prefix length.
    #[error("has no prefix length; write {0}")]
    NoPrefix(String),
    /// Not an address with prefix length at all.
    #[error("is not an address range; write it like 10.0.0.0/8 or fd00::/8, without spaces")]
    NotACidr,
    /// A prefix length larger than the family has bits.
    #[error("has a prefix length larger than {0}")]
    PrefixTooLong(u8),
    /// Not an interface name.
    #[error(
        "is not an interface name: it has 1 to 15 characters, starts with a letter and continues with letters, digits, '_', '.' or '-'"
    )]
    NotAnInterface,
    /// Neither a number nor a known user or group.
    #[error("is neither a number nor a name in {0}; write the numeric id")]
    UnknownName(&'static str),
    /// Not an address that probes can have as their source.
    #[error(
        "is not an {family} address that probes can have as their source; write one that no host has, such as {usual}"
    )]
    NotAProbeSource {
        /// The family that it should be of.
        family: Family,
        /// The usual address.
        usual: core::net::IpAddr,
    },
    /// Not true or false.
    #[error("is neither true nor false; write true or false")]
    NotABool,
    /// Not one of a closed set of words.
    #[error("is not one of {0}")]
    NotOneOf(&'static str),
    /// One of a closed set of words, but for small and capital letters.
    #[error("is not one of {words}; write {meant}")]
    OtherCase {
        /// The words.
        words: &'static str,
        /// The one that is meant.
        meant: &'static str,
    },
    /// Something that another setting rules out.
    #[error("{0}")]
    Contradiction(&'static str),
    /// A word of a command line that is not a setting's; the text says what to write instead.
    #[error("{0}")]
    Usage(String),
    /// Not a duration.
    #[error("is not a duration; write it like 500ms, 5s or 1m30s")]
    NotADuration,
    /// Not a CIDR inside 127.0.0.0/8.
    #[error("is not a range inside 127.0.0.0/8 with a prefix length of 8 to 32")]
    NotLoopback,
    /// More values than the kernel takes.
    #[error("are {found} values; at most {most} are possible")]
    TooMany {
        /// How many were given.
        found: usize,
        /// How many are possible.
        most: usize,
    },
    /// A routing table the kernel needs for itself.
    #[error(
        "is a table the kernel uses itself (0 unspecified, 253 default, 254 main, 255 local); use another, such as 133"
    )]
    ReservedTable,
    /// A value that would clash with one the plan uses for something else.
    #[error("is the mark of the proxy's own packets; use another, such as 1337")]
    ProxyMark,
    /// A mark with bits that another one needs.
    #[error("has bits of {0}, the mark of strict capture; use another, such as 1337")]
    GuardMark(MaskedMark),
    /// A port that another listener of the proxy has.
    #[error("is the port of {0} as well; the proxy cannot distinguish the two kinds of connections")]
    PortTaken(&'static str),
    /// A list of the proxy's users or groups without an ID.
    #[error("lists no ID; without an exempt ID, the proxy's calls would be sent back to it")]
    NoIdentity,
    /// A list of DNS servers without a server.
    #[error("names no server; capture no queries, or all of them")]
    NoServer,
    /// No address to decide the families by.
    #[error("no address on any interface but loopback and link-local ones; is the pod network attached?")]
    NoAddress,
}

/// Reads an unsigned decimal number, strictly: no sign, no blanks, no leading zero, no underscore.
pub(crate) fn decimal(text: &str, what: &'static str, min: u32, max: u32) -> Result<u32, Problem> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Problem::NotANumber);
    }
    if text.len() > 1 && text.starts_with('0') {
        return Err(Problem::LeadingZero);
    }
    text.parse().ok().filter(|number| (min..=max).contains(number)).ok_or(Problem::OutOfRange {
        what,
        min,
        max,
    })
}

/// Like [`decimal`], and `0x` introduces a hexadecimal number, as iptables reads it.
fn decimal_or_hex(text: &str, what: &'static str, min: u32, max: u32) -> Result<u32, Problem> {
    let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) else {
        return decimal(text, what, min, max);
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(Problem::NotANumber);
    }
    let number = u32::from_str_radix(digits, 16).ok().filter(|number| (min..=max).contains(number));
    number.ok_or(Problem::OutOfRange { what, min, max })
}

/// A port something listens on: 1 to 65535.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Port(NonZeroU16);

impl Port {
    /// The port with this number; `None` for 0.
    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        match NonZeroU16::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// A port known when the program is built; 1 in place of 0.
    #[must_use]
    pub(crate) const fn known(number: u16) -> Self {
        match NonZeroU16::new(number) {
            Some(number) => Self(number),
            None => Self(NonZeroU16::MIN),
        }
    }

    /// Its number.
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0.get()
    }
}

impl FromStr for Port {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let number = decimal_or_hex(text, "listening ports", 1, 65535)?;
        u16::try_from(number).ok().and_then(Self::new).ok_or(Problem::NotANumber)
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One port, or several in a row, that a packet's port is compared with: 0 to 65535, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// The range from `first` to `last`, both included; `None` when it ends before it starts.
    #[must_use]
    pub const fn new(first: u16, last: u16) -> Option<Self> {
        if first <= last { Some(Self { first, last }) } else { None }
    }

    /// Every port.
    pub const ALL: Self = Self { first: 0, last: u16::MAX };

    /// A single port.
    #[must_use]
    pub const fn single(port: u16) -> Self {
        Self { first: port, last: port }
    }

    /// The first port.
    #[must_use]
    pub const fn first(self) -> u16 {
        self.first
    }

    /// The last port.
    #[must_use]
    pub const fn last(self) -> u16 {
        self.last
    }

    /// Whether a port lies in it.
    #[must_use]
    pub const fn contains(self, port: u16) -> bool {
        self.first <= port && port <= self.last
    }

    /// Reads `80`, or a range, as its place writes them.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str, syntax: PortSyntax) -> Result<Self, Problem> {
        let read = if syntax == PortSyntax::Flag { decimal_or_hex } else { decimal };
        let number = |text: &str| {
            let number = read(text, "ports", 0, 65535)?;
            u16::try_from(number).map_err(|_| Problem::NotANumber)
        };
        let separators: &[char] = if syntax == PortSyntax::Annotation { &[':', '-'] } else { &[':'] };
        match text.split_once(separators) {
            Some((first, last)) => Self::new(number(first)?, number(last)?).ok_or(Problem::BackwardRange),
            None => number(text).map(Self::single).map_err(|problem| match text.split_once('-') {
                Some((first, last)) if number(first).is_ok() && number(last).is_ok() => {
                    Problem::DashRange(alloc::format!("{first}:{last}"))
                }
                Some(_) | None => problem,
            }),
        }
    }
}

/// As iptables and settings have it: `80`, or `8000:8099`.
impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{}:{}", self.first, self.last)
        }
    }
}

/// How ports are written, by place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortSyntax {
    /// In flags and variables, as iptables reads them: `80`, `0x50`, `80:90`.
    Flag,
    /// In annotations: `80`, `80-90`, `80:90`.
    Annotation,
    /// As iptables-save prints them: `80`, `80:90`.
    Saved,
}

impl From<Port> for PortRange {
    fn from(port: Port) -> Self {
        Self::single(port.number())
    }
}

/// A netfilter mark (`fwmark`), compared and set in all its 32 bits: 1 to 4294967295.
///
/// 0 is the mark of unmarked packets, so it distinguishes nothing and cannot be built.
///
/// ```
/// use redirect_core::values::Mark;
///
/// assert_eq!(Mark::new(1337), "0x539".parse().ok());
/// assert_eq!(Mark::new(0), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Mark(NonZeroU32);

impl Mark {
    /// That of the proxy's own packets in TPROXY mode: 1338.
    pub const PROXY: Self = Self::known(1338);

    /// The mark of this value; `None` for 0.
    #[must_use]
    pub const fn new(value: u32) -> Option<Self> {
        match NonZeroU32::new(value) {
            Some(value) => Some(Self(value)),
            None => None,
        }
    }

    /// A mark known when the program is built; 1 in place of 0.
    #[must_use]
    pub(crate) const fn known(value: u32) -> Self {
        match NonZeroU32::new(value) {
            Some(value) => Self(value),
            None => Self(NonZeroU32::MIN),
        }
    }

    /// Its value.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0.get()
    }
}

impl FromStr for Mark {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let value = decimal_or_hex(text, "marks", 1, u32::MAX)?;
        Self::new(value).ok_or(Problem::NotANumber)
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.value())
    }
}

/// A mark in some of its bits: the rest is another program's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct MaskedMark {
    value: u32,
    mask: u32,
}

impl MaskedMark {
    /// `value` in the bits of `mask`; `None` where it has others, or none.
    #[must_use]
    pub const fn new(value: u32, mask: u32) -> Option<Self> {
        if value != 0 && value & !mask == 0 { Some(Self { value, mask }) } else { None }
    }

    /// A mark known when the program is built.
    pub(crate) const fn known(value: u32, mask: u32) -> Self {
        Self { value, mask }
    }

    /// That of connections that are not captured, with strict capture: in the middle, where few others have theirs, and beside TPROXY's.
    pub const GUARD: Self = Self::known(0x053b_0000, 0x0fff_0000);

    /// The value.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.value
    }

    /// The bits that count.
    #[must_use]
    pub const fn mask(self) -> u32 {
        self.mask
    }

    /// The mark it is when all its bits count; `None` where only some do.
    #[must_use]
    pub const fn whole(self) -> Option<Mark> {
        if self.mask == u32::MAX { Mark::new(self.value) } else { None }
    }

    /// Another mark, in the bits that this one leaves; `None` where it needs more.
    #[must_use]
    pub const fn beside(self, mark: Mark) -> Option<Self> {
        Self::new(mark.value(), !self.mask)
    }

    /// Whether a mark has this value in these bits.
    #[must_use]
    pub const fn covers(self, mark: u32) -> bool {
        mark & self.mask == self.value
    }

    /// Reads `0x539`, or `0x539/0xfff`, as iptables-save prints them.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (value, mask) = match text.split_once('/') {
            Some((value, mask)) => (value, mask.parse::<Mark>().ok()?.value()),
            None => (text, u32::MAX),
        };
        Self::new(value.parse::<Mark>().ok()?.value(), mask)
    }
}

impl From<Mark> for MaskedMark {
    fn from(mark: Mark) -> Self {
        Self { value: mark.value(), mask: u32::MAX }
    }
}

impl fmt::Display for MaskedMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.value)?;
        if self.mask == u32::MAX { Ok(()) } else { write!(f, "/{:#x}", self.mask) }
    }
}

/// The number of a routing table that is free for use: 1 to 252 and 256 upwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RouteTable(u32);

impl RouteTable {
    /// The table with this number; `None` for those the kernel uses itself (0, 253 to 255).
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        match number {
            0 | 253..=255 => None,
            _ => Some(Self(number)),
        }
    }

    /// A table known when the program is built.
    #[must_use]
    pub(crate) const fn known(number: u32) -> Self {
        Self(number)
    }

    /// Its number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }
}

impl FromStr for RouteTable {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        Self::new(decimal(text, "route tables", 0, u32::MAX)?).ok_or(Problem::ReservedTable)
    }
}

impl fmt::Display for RouteTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of a network interface, or the beginning of names (`eth+`).
///
/// At most 15 bytes (`IFNAMSIZ` less its terminator), a letter first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceName {
    name: String,
    prefix: bool,
}

impl InterfaceName {
    /// The loopback interface.
    #[must_use]
    pub fn loopback() -> Self {
        Self { name: String::from("lo"), prefix: false }
    }

    /// The name, without the `+` of a prefix.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether every name that begins so is meant.
    #[must_use]
    pub const fn is_prefix(&self) -> bool {
        self.prefix
    }

    /// Whether the interface of this name is meant.
    #[must_use]
    pub fn covers(&self, interface: &str) -> bool {
        if self.prefix { interface.starts_with(&self.name) } else { interface == self.name }
    }

    /// Reads one exact name; a trailing `+` is not allowed.
    pub(crate) fn parse_exact(text: &str) -> Result<Self, Problem> {
        let name: Self = text.parse()?;
        if name.prefix { Err(Problem::NotAnInterface) } else { Ok(name) }
    }
}

impl FromStr for InterfaceName {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let (name, prefix) = match text.strip_suffix('+') {
            Some(name) => (name, true),
            None => (text, false),
        };
        let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
        let starts_well = name.bytes().next().is_some_and(|b| b.is_ascii_alphabetic());
        if text.len() > 15 || !starts_well || !name.bytes().all(good) {
            return Err(Problem::NotAnInterface);
        }
        Ok(Self { name: name.to_string(), prefix })
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.name, if self.prefix { "+" } else { "" })
    }
}

/// Address ranges, split by family, in the order given. Host bits are dropped, as the kernel drops them.
///
/// ```
/// use redirect_core::{Family, values::Cidrs};
///
/// let ranges: Cidrs = ["10.1.2.3/8".parse().unwrap()].into_iter().collect();
/// assert_eq!(ranges.of(Family::V4), ["10.0.0.0/8".parse().unwrap()]);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Cidrs {
    v4: Vec<Ipv4Net>,
    v6: Vec<Ipv6Net>,
}

impl Cidrs {
    /// No range at all.
    #[must_use]
    pub const fn new() -> Self {
        Self { v4: Vec::new(), v6: Vec::new() }
    }

    /// Reads an address range, strictly: an address, a slash, a prefix length; host bits are dropped.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse_one(text: &str) -> Result<IpNet, Problem> {
        if text.is_empty() {
            return Err(Problem::EmptyElement);
        }
        if text == "*" {
            return Err(Problem::StarInList);
        }
        let Some((address, prefix)) = text.rsplit_once('/') else {
            let of_host = |address| Problem::NoPrefix(IpNet::from(address).to_string());
            return Err(text.parse::<IpAddr>().map_or(Problem::NotACidr, of_host));
        };
        let address: IpAddr = address.parse().map_err(|_| Problem::NotACidr)?;
        let bits = IpNet::from(address).max_prefix_len();
        let length = decimal(prefix, "prefix lengths", 0, 255).map_err(|_| Problem::NotACidr)?;
        let length = u8::try_from(length).map_err(|_| Problem::NotACidr)?;
        IpNet::new(address, length).map(|net| net.trunc()).map_err(|_| Problem::PrefixTooLong(bits))
    }

    /// Adds a range to the list of its family.
    pub fn push(&mut self, net: IpNet) {
        match net {
            IpNet::V4(net) => self.v4.push(net.trunc()),
            IpNet::V6(net) => self.v6.push(net.trunc()),
        }
    }

    /// Whether neither family has a range.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }

    /// Number of ranges, of both families.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.v4.len().saturating_add(self.v6.len())
    }

    /// The ranges of one family.
    #[must_use]
    pub fn of(&self, family: Family) -> Vec<IpNet> {
        match family {
            Family::V4 => self.v4.iter().copied().map(IpNet::V4).collect(),
            Family::V6 => self.v6.iter().copied().map(IpNet::V6).collect(),
        }
    }

    /// The ranges of both families, those of IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = IpNet> {
        self.v4.iter().copied().map(IpNet::V4).chain(self.v6.iter().copied().map(IpNet::V6))
    }

    /// Whether any range begins with a loopback address (127.0.0.0/8 or ::1).
    #[must_use]
    pub fn touches_loopback(&self) -> bool {
        self.iter().any(|net| net.addr().is_loopback())
    }
}

impl FromIterator<IpNet> for Cidrs {
    fn from_iter<I: IntoIterator<Item = IpNet>>(nets: I) -> Self {
        let mut cidrs = Self::new();
        cidrs.extend(nets);
        cidrs
    }
}

impl Extend<IpNet> for Cidrs {
    fn extend<I: IntoIterator<Item = IpNet>>(&mut self, nets: I) {
        nets.into_iter().for_each(|net| self.push(net));
    }
}

/// Whether other hosts may know a pod by this address: not loopback, link-local, unspecified, nor the one that a run gives the
/// loopback interface ([`Family::PASSTHROUGH_V6`]).
#[must_use]
pub fn is_routable(address: &IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let ours = *address == IpAddr::V6(Family::PASSTHROUGH_V6);
    !address.is_loopback() && !address.is_unspecified() && !link_local && !ours
}

/// Reads a boolean as the reference does: `1 t T true TRUE True` and `0 f F false FALSE False`.
///
/// # Errors
/// [`Problem::NotABool`].
pub fn parse_bool(text: &str) -> Result<bool, Problem> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(Problem::NotABool),
    }
}

/// Reads one of a closed set of words, each with what it stands for; `listed` is the words for people.
///
/// # Errors
/// Another word: [`Problem::OtherCase`] where only small and capital letters differ, else [`Problem::NotOneOf`].
pub fn parse_word<T: Copy>(
    text: &str,
    words: &[(&'static str, T)],
    listed: &'static str,
) -> Result<T, Problem> {
    if let Some((_, value)) = words.iter().find(|(word, _)| *word == text) {
        return Ok(*value);
    }
    Err(match words.iter().find(|(word, _)| word.eq_ignore_ascii_case(text)) {
        Some((meant, _)) => Problem::OtherCase { words: listed, meant },
        None => Problem::NotOneOf(listed),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_both_families_are_counted() {
        let ranges =
            |texts: &[&str]| -> Cidrs { texts.iter().map(|text| text.parse::<IpNet>().unwrap()).collect() };
        for (texts, number) in
            [(&[][..], 0), (&["10.0.0.0/8"], 1), (&["10.0.0.0/8", "fd00::/8", "fe80::/10"], 3)]
        {
            let ranges = ranges(texts);
            assert_eq!(
                (ranges.len(), ranges.is_empty(), ranges.iter().count()),
                (number, number == 0, number)
            );
        }
    }

    #[test]
    fn ports_are_read_strictly() {
        assert_eq!("15001".parse(), Ok(Port::known(15001)));
        assert_eq!("0x50".parse(), Ok(Port::known(80)));
        assert_eq!("080".parse::<Port>(), Err(Problem::LeadingZero));
        for bad in ["", " 80", "+80", "8_0", "http", "-1", "0x", "80 -j ACCEPT", "80\n"] {
            assert_eq!(bad.parse::<Port>(), Err(Problem::NotANumber), "{bad:?}");
        }
        for bad in ["0", "65536", "99999999999"] {
            assert!(matches!(bad.parse::<Port>(), Err(Problem::OutOfRange { .. })), "{bad:?}");
        }
    }

    #[test]
    fn port_ranges_have_two_ends_in_order() {
        let range = Ok(PortRange { first: 80, last: 90 });
        assert_eq!(PortRange::parse("80:90", PortSyntax::Flag), range);
        assert_eq!(PortRange::parse("80-90", PortSyntax::Annotation), range);
        assert_eq!(PortRange::parse("0x50:0x5a", PortSyntax::Flag), range);
        assert_eq!(PortRange::parse("0", PortSyntax::Saved), Ok(PortRange::single(0)));
        assert_eq!(PortRange::parse("90:80", PortSyntax::Flag), Err(Problem::BackwardRange));
        assert_eq!(PortRange::parse("80-90", PortSyntax::Flag), Err(Problem::DashRange("80:90".into())));
        for bad in ["80-", "-90", "80-http", "80-90-100"] {
            assert_eq!(PortRange::parse(bad, PortSyntax::Flag), Err(Problem::NotANumber), "{bad}");
        }
        assert_eq!(PortRange::parse("0x50", PortSyntax::Annotation), Err(Problem::NotANumber));
    }

    #[test]
    fn interface_names_are_the_kernels() {
        for good in ["eth0", "k6t-eth0", "a", "eth0.100", "vnet_1", "eth+"] {
            assert_eq!(good.parse::<InterfaceName>().map(|name| name.to_string()).as_deref(), Ok(good));
        }
        for bad in ["", "averyverylonginterfacename", "a/b", "eth0 -j ACCEPT", "0eth", "+", "é"] {
            assert_eq!(bad.parse::<InterfaceName>(), Err(Problem::NotAnInterface), "{bad:?}");
        }
        assert!(InterfaceName::parse_exact("eth+").is_err());
        assert!("eth+".parse::<InterfaceName>().unwrap().covers("eth7"));
    }

    #[test]
    fn cidrs_lose_their_host_bits() {
        assert_eq!(Cidrs::parse_one("10.1.2.3/8"), Ok("10.0.0.0/8".parse().unwrap()));
        assert_eq!(Cidrs::parse_one("10.0.0.1"), Err(Problem::NoPrefix("10.0.0.1/32".into())));
        assert_eq!(Cidrs::parse_one("10.0.0.0/33"), Err(Problem::PrefixTooLong(32)));
        assert_eq!(Cidrs::parse_one("*"), Err(Problem::StarInList));
        for bad in ["cluster", " 10.0.0.0/8", "10.0.0.0/8 ", "10.0.0.0/+8", "10.0.0.0/", "/8", "10.0.0.0/8/8"]
        {
            assert_eq!(Cidrs::parse_one(bad), Err(Problem::NotACidr), "{bad:?}");
        }
    }

    #[test]
    fn reserved_route_tables_are_refused() {
        for reserved in ["0", "253", "254", "255"] {
            assert_eq!(reserved.parse::<RouteTable>(), Err(Problem::ReservedTable));
        }
        assert_eq!("133".parse::<RouteTable>().map(RouteTable::number), Ok(133));
    }

    #[test]
    fn a_masked_mark_looks_at_its_bits_alone() {
        let mark = MaskedMark::new(0x0530, 0x0ff0).unwrap();
        assert!([0x0530, 0xf53f].iter().all(|other| mark.covers(*other)));
        assert!([0, 0x0520, 0x0570, 0x0ff0].iter().all(|other| !mark.covers(*other)));
    }

    #[test]
    fn hexadecimal_numbers_have_the_same_limits() {
        let read = |text: &str| decimal_or_hex(text, "listening ports", 1, 65535);
        let out_of_range = Problem::OutOfRange { what: "listening ports", min: 1, max: 65535 };
        for (text, wanted) in [
            ("65535", Ok(65535)),
            ("0xffff", Ok(65535)),
            ("0X1", Ok(1)),
            ("0", Err(out_of_range.clone())),
            ("0x0", Err(out_of_range.clone())),
            ("65536", Err(out_of_range.clone())),
            ("0x10000", Err(out_of_range.clone())),
            ("0x100000000", Err(out_of_range)),
            ("0x", Err(Problem::NotANumber)),
            ("0x+1", Err(Problem::NotANumber)),
        ] {
            assert_eq!(read(text), wanted, "{text}");
        }
    }
}
