//! The environment: what the runtime wants done, to which container.

use super::{CniError, Code};
use crate::pod_name::is_name;
use std::{ffi::OsString, path::PathBuf};

/// What the runtime wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CniCommand {
    /// Attach a container.
    Add,
    /// Look whether an attachment is as it should be.
    Check,
    /// Detach a container.
    Del,
    /// Drop what is kept for attachments that are gone.
    Gc,
    /// Say whether containers can be attached.
    Status,
    /// Say which versions of the specification are spoken.
    Version,
}

impl CniCommand {
    const ALL: [Self; 6] = [Self::Add, Self::Check, Self::Del, Self::Gc, Self::Status, Self::Version];

    /// Its name in CNI_COMMAND.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Check => "CHECK",
            Self::Del => "DEL",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }

    /// The variables it needs.
    const fn needs(self) -> &'static [&'static str] {
        match self {
            Self::Add | Self::Check => &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"],
            Self::Del => &["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"],
            Self::Gc | Self::Status => &["CNI_PATH"],
            Self::Version => &[],
        }
    }
}

/// The pod in CNI_ARGS. Empty if unset.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodArgs {
    /// `K8S_POD_NAMESPACE`.
    pub namespace: String,
    /// `K8S_POD_NAME`.
    pub name: String,
    /// `K8S_POD_UID`.
    pub uid: String,
}

/// The environment, parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invocation {
    /// The command.
    pub command: CniCommand,
    /// The container; empty where the command needs none.
    pub container_id: String,
    /// Its network namespace.
    pub netns: Option<PathBuf>,
    /// Its interface; empty where the command needs none.
    pub ifname: String,
    /// The pod.
    pub pod: PodArgs,
}

impl Invocation {
    /// Reads the environment; `get` looks up a variable.
    ///
    /// # Errors
    /// Everything that is wrong with it, in one error (code 4).
    pub fn read(get: impl Fn(&str) -> Option<OsString>) -> Result<Self, CniError> {
        let mut problems = Vec::new();
        let mut text = |name: &str| match get(name).unwrap_or_default().into_string() {
            Ok(text) => text,
            Err(bytes) => {
                problems.push(format!("{name}: {bytes:?} is not UTF-8"));
                String::new()
            }
        };
        let word = text("CNI_COMMAND");
        let (container_id, ifname, args) = (text("CNI_CONTAINERID"), text("CNI_IFNAME"), text("CNI_ARGS"));
        let netns = get("CNI_NETNS").filter(|path| !path.is_empty()).map(PathBuf::from);
        let command = CniCommand::ALL.into_iter().find(|command| command.word() == word);
        let Some(command) = command else {
            let known = CniCommand::ALL.map(CniCommand::word).join(", ");
            problems.insert(0, format!("CNI_COMMAND: {word:?} is not one of {known}"));
            return Err(CniError::of_problems(Code::Environment, &problems));
        };
        for name in command.needs() {
            if get(name).is_none_or(|value| value.is_empty()) {
                problems.push(format!("{name}: missing; {word} needs it"));
            }
        }
        check_container_id(&container_id, &mut problems);
        check_ifname(&ifname, &mut problems);
        let pod = match command {
            CniCommand::Add | CniCommand::Check => pod_args(&args, &mut problems),
            CniCommand::Del | CniCommand::Gc | CniCommand::Status | CniCommand::Version => PodArgs::default(),
        };
        if command == CniCommand::Version || problems.is_empty() {
            return Ok(Self { command, container_id, netns, ifname, pod });
        }
        Err(CniError::of_problems(Code::Environment, &problems))
    }
}

/// Letters, digits, dots, dashes and underscores; the first a letter or digit.
pub(crate) fn is_plain_name(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

fn check_container_id(text: &str, problems: &mut Vec<String>) {
    if !text.is_empty() && !is_plain_name(text) {
        problems.push(format!(
            "CNI_CONTAINERID: {text:?} has characters other than letters, digits, '_', '.' and '-'"
        ));
    }
}

/// What the kernel accepts as the name of an interface.
fn check_ifname(text: &str, problems: &mut Vec<String>) {
    let problem = match text {
        "." | ".." => "is not a name",
        _ if text.len() > 15 => "is longer than 15 bytes",
        _ if text.contains(|c: char| c == '/' || c == ':' || c.is_whitespace()) => {
            "has a slash, colon or blank"
        }
        _ => return,
    };
    problems.push(format!("CNI_IFNAME: {text:?} {problem}"));
}

/// Reads `KEY=VALUE;KEY=VALUE`. Unknown keys are refused unless `IgnoreUnknown` is true, as in the CNI library.
fn pod_args(text: &str, problems: &mut Vec<String>) -> PodArgs {
    let mut args = PodArgs::default();
    let mut unknown = Vec::new();
    let mut ignore_unknown = false;
    for pair in text.split(';').filter(|_| !text.is_empty()) {
        let (key, value) = match pair.split_once('=') {
            Some((key, value)) if !value.contains('=') => (key, value),
            Some(_) | None => {
                problems.push(format!("CNI_ARGS: {pair:?} is not KEY=VALUE"));
                continue;
            }
        };
        match key {
            "K8S_POD_NAMESPACE" => args.namespace = value.to_owned(),
            "K8S_POD_NAME" => args.name = value.to_owned(),
            "K8S_POD_UID" => args.uid = value.to_owned(),
            "K8S_POD_INFRA_CONTAINER_ID" => {}
            "IgnoreUnknown" => match value {
                "1" | "true" => ignore_unknown = true,
                "0" | "false" => ignore_unknown = false,
                _ => problems.push(format!("CNI_ARGS: IgnoreUnknown: {value:?} is neither true nor false")),
            },
            _ => unknown.push(key),
        }
    }
    if !ignore_unknown {
        problems.extend(
            unknown.iter().map(|key| format!("CNI_ARGS: {key:?} is not known; IgnoreUnknown=1 lets it pass")),
        );
    }
    check_dns_name("K8S_POD_NAMESPACE", &args.namespace, 63, problems);
    check_dns_name("K8S_POD_NAME", &args.name, 253, problems);
    args
}

/// What Kubernetes accepts as a name.
fn check_dns_name(key: &str, text: &str, most: usize, problems: &mut Vec<String>) {
    if !text.is_empty() && !is_name(text, most) {
        let shown: String = text.chars().take(80).collect();
        problems.push(format!("CNI_ARGS: {key}: {shown:?} is not a Kubernetes name"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Invocation, CniError> {
        let all = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "abc"),
            ("CNI_NETNS", "/run/netns/x"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
        ];
        Invocation::read(|name| {
            let said = pairs.iter().chain(&all).find(|(key, _)| *key == name);
            said.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn a_kubelets_environment_is_read() {
        let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0.a;K8S_POD_UID=u;FOO=";
        let invocation = read(&[("CNI_ARGS", args)]).unwrap();
        let PodArgs { namespace, name, uid } = invocation.pod;
        assert_eq!((namespace.as_str(), name.as_str(), uid.as_str()), ("shop", "cart-0.a", "u"));
    }

    #[test]
    fn all_problems_come_together() {
        let error = read(&[
            ("CNI_CONTAINERID", ""),
            ("CNI_IFNAME", "a b"),
            ("CNI_PATH", ""),
            ("CNI_ARGS", "FOO=1;x;K8S_POD_NAME=../a"),
        ])
        .unwrap_err();
        assert_eq!(error.code, Code::Environment);
        for name in ["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH", "\"FOO\"", "\"x\"", "K8S_POD_NAME"] {
            assert!(error.message.contains(name), "{name} is missing in {error}");
        }
    }

    #[test]
    fn version_needs_nothing_and_del_no_namespace() {
        let nothing = |name: &str| (name == "CNI_COMMAND").then(|| "VERSION".into());
        assert_eq!(Invocation::read(nothing).map(|read| read.command), Ok(CniCommand::Version));
        let del = read(&[("CNI_COMMAND", "DEL"), ("CNI_NETNS", ""), ("CNI_ARGS", "broken")]).unwrap();
        assert_eq!(del.netns, None);
    }
}
