//! The means of a run: helper programs, a routing socket and, where it serves, a socket for nf_tables.

use crate::{
    ApplyError,
    exec::Programs,
    netlink::{Connection, NetlinkError},
    routes::RouteSocket,
};
use redirect_core::options::{BackendChoice, Variant};

/// What a run looks and acts with, in the calling thread's network namespace.
pub(crate) struct Means<'a> {
    pub(crate) programs: &'a Programs,
    pub(crate) routes: RouteSocket,
    /// Where it is there, whatever concerns nf_tables goes over it; no helper program is run for that.
    pub(crate) netlink: Option<Connection>,
}

impl<'a> Means<'a> {
    /// Opens the sockets. Who asks for iptables' programs gets nothing else.
    pub(crate) fn open(programs: &'a Programs, choice: BackendChoice) -> Result<Self, ApplyError> {
        let netlink = match choice {
            BackendChoice::Restore(_) => None,
            BackendChoice::Netlink => Some(connect()?),
            BackendChoice::Auto | BackendChoice::NativeNft => match connect() {
                Ok(connection) => Some(connection),
                Err(NetlinkError::NoNfTables) => None,
                Err(cause) => return Err(cause.into()),
            },
        };
        Ok(Self { programs, routes: RouteSocket::open()?, netlink })
    }

    /// Whether the rules of a variant are changed over netlink.
    pub(crate) const fn serves(&self, variant: Variant) -> bool {
        match variant {
            Variant::Nft => self.netlink.is_some(),
            Variant::Legacy => false,
        }
    }
}

/// A connection that the kernel answers on.
fn connect() -> Result<Connection, NetlinkError> {
    let mut connection = Connection::open()?;
    connection.probe()?;
    Ok(connection)
}
