//! Another program that undoes our changes: when to back off, and which program it may be.

use std::time::{Duration, Instant};

/// Changes that are reverted at once within [`WINDOW`]. Network plugins write a few times while they start.
const PATIENCE: usize = 3;
/// How far back changes count.
const WINDOW: Duration = Duration::from_secs(60);
/// The first wait; each further one is twice as long.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// How long to wait after another program wrote a file at the same moment.
const COLLISION_WAIT: Duration = Duration::from_millis(50);
/// How often in a row that is nothing to speak of.
const MOST_COLLISIONS: u32 = 20;

/// The changes that other programs made to ours.
#[derive(Debug)]
pub struct WriteConflict {
    patience: usize,
    recent: Vec<Instant>,
    wait: Option<Duration>,
}

impl Default for WriteConflict {
    fn default() -> Self {
        Self::after(PATIENCE)
    }
}

impl WriteConflict {
    /// One that begins when so many changes were reverted within a minute.
    #[must_use]
    pub const fn after(changes: usize) -> Self {
        Self { patience: changes, recent: Vec::new(), wait: None }
    }

    /// Notes that our state was restored, and returns how long to ignore the next change.
    pub fn restored(&mut self, now: Instant) -> Option<Duration> {
        let window = WINDOW + self.wait.unwrap_or_default();
        let is_past = |at: &Instant| now.duration_since(*at) > window;
        let is_calm = self.recent.last().is_none_or(is_past);
        self.recent.push(now);
        self.recent.retain(|at| !is_past(at));
        if is_calm {
            self.wait = None;
        }
        // Once it has begun, waiting does not end it: only calm does.
        if self.wait.is_none() && self.recent.len() < self.patience {
            return None;
        }
        let wait = self.wait.map_or(FIRST_WAIT, |wait| (wait * 2).min(LONGEST_WAIT));
        self.wait = Some(wait);
        Some(wait)
    }
}

/// Which program writes a file with these plugins, and how to make it stop; `is_copy` is whether the file is our own copy in front.
#[must_use]
pub fn suspect(file: &str, plugins: &[String], is_copy: bool) -> String {
    let is = |part: &str| file.contains(part) || plugins.iter().any(|plugin| plugin.contains(part));
    let known = WRITERS.iter().find(|(part, _, _)| is(part));
    let own_copy = if is_copy { "stop it from changing this agent's file" } else { OWN_COPY };
    match known {
        Some((_, name, remedy)) => {
            format!("another program, probably {name}, keeps changing {file}: {}", remedy.unwrap_or(own_copy))
        }
        None => format!(
            "another program keeps changing {file} (its plugins: {}); find it, or {own_copy}",
            plugins.join(", ")
        ),
    }
}

/// What helps against writers of the network plugin's own file.
const OWN_COPY: &str = "set ISTIO_OWNED_CNI_CONFIG=true (chart: istioOwnedCNIConfig)";

/// Part of a file name or plugin type, the software that has it, and what to do if an own copy does not help. The first that fits counts.
const WRITERS: [(&str, &str, Option<&str>); 11] = [
    ("cilium", "Cilium", Some("set its Helm value cni.exclusive=false")),
    (
        "multus",
        "Multus",
        Some("install into Multus's own directory with CHAINED_CNI_PLUGIN=false (chart: chained)"),
    ),
    ("calico", "Calico's install-cni", None),
    ("aws", "the AWS VPC plugin's aws-node", None),
    ("azure", "Azure's node agent", None),
    ("ovn", "OVN-Kubernetes", None),
    ("antrea", "Antrea", None),
    ("weave", "Weave", None),
    ("flannel", "flannel or k3s", None),
    ("linkerd", "Linkerd's installer", Some("two meshes want the same pods; remove one from this node")),
    ("kindnet", "kindnet", None),
];

/// Passes in a row that another program's write interrupted. A program that never pauses keeps our entry out of its file, which is a failure like any.
#[derive(Debug, Default)]
pub struct Collisions(u32);

impl Collisions {
    /// How long to wait after another one before the next pass; none after too many.
    pub fn another(&mut self) -> Option<Duration> {
        self.0 += 1;
        (self.0 <= MOST_COLLISIONS).then_some(COLLISION_WAIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_that_never_pauses_is_a_failure_after_a_second() {
        let mut collisions = Collisions::default();
        let waited: Duration = std::iter::from_fn(|| collisions.another()).sum();
        assert_eq!(waited, Duration::from_secs(1));
        assert_eq!(collisions.another(), None, "until a pass comes through");
    }

    #[test]
    fn waits_double_up_to_a_minute_and_calm_ends_them() {
        let (mut fight, mut now) = (WriteConflict::default(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..10 {
            let wait = fight.restored(now);
            waits.push(wait.map_or(0, |wait| wait.as_secs()));
            now += wait.unwrap_or(Duration::from_millis(100));
        }
        assert_eq!(waits, [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]);
        now += Duration::from_secs(300);
        assert_eq!(fight.restored(now), None);
        assert_eq!(fight.restored(now), None);
        assert_eq!(fight.restored(now), Some(FIRST_WAIT));
    }

    #[test]
    fn who_has_more_patience_waits_as_long_in_the_end() {
        let (mut fight, mut now) = (WriteConflict::after(60), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..80 {
            let wait = fight.restored(now);
            waits.push(wait.map_or(0, |wait| wait.as_secs()));
            now += wait.unwrap_or(Duration::from_millis(100));
        }
        assert_eq!(waits[..59], [0; 59]);
        assert_eq!(waits[59..67], [1, 2, 4, 8, 16, 32, 60, 60]);
        assert!(waits[67..].iter().all(|wait| *wait == 60), "{waits:?}");
    }

    #[test]
    fn rare_changes_are_no_fight() {
        let (mut fight, start) = (WriteConflict::default(), Instant::now());
        assert!((0..100).all(|minute| fight.restored(start + Duration::from_secs(minute * 61)).is_none()));
    }

    #[test]
    fn suspects_are_named() {
        let plugins = ["cilium-cni".to_owned()];
        for is_copy in [false, true] {
            let text = suspect("05-x.conflist", &plugins, is_copy);
            assert!(text.contains("Cilium") && text.contains("cni.exclusive=false"), "{text}");
        }
        for plugin in ["bridge", "calico"] {
            let text = suspect("10-x.conflist", &[plugin.to_owned()], false);
            assert!(text.contains(plugin) || text.contains("Calico"), "{text}");
            assert!(text.ends_with("set ISTIO_OWNED_CNI_CONFIG=true (chart: istioOwnedCNIConfig)"), "{text}");
            let text = suspect("02-x.conflist", &[plugin.to_owned()], true);
            assert!(!text.contains("ISTIO_OWNED_CNI_CONFIG"), "it is set already: {text}");
        }
    }
}
