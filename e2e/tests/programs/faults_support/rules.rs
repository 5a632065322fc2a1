//! `istio-iptables`: applying, reconciling, cleaning up.

use anyhow::{Result, ensure};
use test_support::netns::{Families, Namespace};

use super::Operation;
use super::place::Place;
use super::run::{Invoked, Wrapping};
use e2e::faults::Ending;

const NOTHING: &str = "";
const REDIRECT: &str = "--dual-stack -b * -d 15090,15021 -i * --redirect-dns --capture-all-dns";
const TPROXY: &str = "--dual-stack -m TPROXY -b * -i *";

/// From one configuration to another.
struct RuleEdit {
    name: &'static str,
    from: &'static str,
    to: &'static str,
}

pub fn operations() -> Vec<Box<dyn Operation>> {
    let changes = [
        RuleEdit { name: "apply", from: NOTHING, to: REDIRECT },
        RuleEdit {
            name: "apply, native",
            from: NOTHING,
            to: "--native-nftables --dual-stack -m TPROXY -b * -i *",
        },
        RuleEdit { name: "apply, helpers", from: NOTHING, to: "--backend restore --dual-stack -b * -i *" },
        RuleEdit { name: "reconcile", from: REDIRECT, to: "--reconcile --dual-stack -m TPROXY -b * -i *" },
        RuleEdit { name: "cleanup", from: TPROXY, to: "--cleanup-only" },
    ];
    changes.into_iter().map(|change| Box::new(change) as Box<dyn Operation>).collect()
}

/// `istio-iptables ARGS` in a namespace, with arguments as on a command line without quotes.
pub fn istio_iptables(namespace: &Namespace, args: &str) -> Result<Invoked> {
    Ok(Invoked { namespace: Some(namespace.name().to_owned()), ..Invoked::of("istio-iptables", args)? })
}

/// Puts a configuration in force.
pub fn put_in_force(namespace: &Namespace, args: &str) -> Result<()> {
    let ended = istio_iptables(namespace, args)?.run(&Wrapping::default(), None)?;
    ensure!(ended.ending == Ending::Code(0), "{args}: {ended:?}");
    Ok(())
}

impl Operation for RuleEdit {
    fn name(&self) -> &'static str {
        self.name
    }

    /// What fails in helper programs is theirs to say; redirect_faults.rs has them fail as a whole.
    fn is_alone(&self) -> bool {
        true
    }

    fn stage(&self) -> Result<Place> {
        let mut place = Place::new()?;
        let namespace = Namespace::pod(Families::Dual)?;
        if self.from != NOTHING {
            put_in_force(&namespace, self.from)?;
        }
        place.namespace = Some(namespace);
        Ok(place)
    }

    fn invoked(&self, place: &Place) -> Result<Invoked> {
        istio_iptables(place.network()?, self.to)
    }
}
