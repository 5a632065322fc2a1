//! The error object.

use super::Version;
use serde::Serialize;

/// What kind of failure it is: the specification's codes below 100, ours from there on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Code {
    /// 1: the configuration's version is not ours, or has no such command.
    IncompatibleVersion = 1,
    /// 4: an environment variable is missing or wrong.
    Environment = 4,
    /// 5: standard input cannot be read.
    Io = 5,
    /// 6: standard input is not a JSON object.
    Decode = 6,
    /// 7: the configuration is wrong.
    Config = 7,
    /// 11: it may work later; the runtime should try again.
    TryAgain = 11,
    /// 50: pods cannot be served now.
    NotAvailable = 50,
    /// 51: pods cannot be served, and running ones may lack something.
    LimitedConnectivity = 51,
    /// 100: the pod's own settings are wrong; its owner has to change them.
    Pod = 100,
    /// 101: the API server refuses us (403); the plugin's role is missing.
    Forbidden = 101,
    /// 102: the API server's certificate cannot be verified.
    Untrusted = 102,
    /// 103: the kubeconfig cannot be used.
    Kubeconfig = 103,
    /// 104: the pod's runtime is sandboxed: rules do not bind it.
    Sandboxed = 104,
    /// 105: the node agent did not enrol a pod of ambient mode.
    NotEnrolled = 105,
    /// 110: the network namespace could not be programmed; it is as it was, or the error says what is left in it.
    NotProgrammed = 110,
    /// 111: CHECK found something that is not as planned.
    NotAsPlanned = 111,
    /// 199: a bug of this program.
    Internal = 199,
}

impl Code {
    /// All of them, each with what it means to a person.
    pub const ALL: [(Self, &'static str); 17] = [
        (
            Self::IncompatibleVersion,
            "the configuration's version is not the plugin's, or has no such command",
        ),
        (Self::Environment, "an environment variable of the runtime is missing or wrong"),
        (Self::Io, "standard input cannot be read"),
        (Self::Decode, "standard input is not a JSON object"),
        (Self::Config, "the configuration is wrong; the message names each key"),
        (Self::TryAgain, "it may work later, and the runtime tries again"),
        (Self::NotAvailable, "pods cannot be served now"),
        (Self::LimitedConnectivity, "pods cannot be served, and those that run may lack something"),
        (Self::Pod, "the pod's own settings are wrong; its owner has to change them"),
        (Self::Forbidden, "the API server refuses the plugin (403): its role is missing"),
        (Self::Untrusted, "the API server's certificate cannot be verified"),
        (Self::Kubeconfig, "the kubeconfig cannot be used"),
        (
            Self::Sandboxed,
            "the pod's runtime is sandboxed: rules do not bind it; docs/concepts/capture.md has the ways out",
        ),
        (Self::NotEnrolled, "the node agent did not enrol a pod of ambient mode; the message has its reason"),
        (Self::NotProgrammed, "the network namespace could not be programmed, and is as it was"),
        (Self::NotAsPlanned, "CHECK found something that is not as planned"),
        (Self::Internal, "a bug of the plugin"),
    ];

    /// The code with this number.
    #[must_use]
    pub fn of(number: u64) -> Option<Self> {
        let mut codes = Self::ALL.into_iter().map(|(code, _)| code);
        codes.find(|code| u64::from(code.number()) == number)
    }

    /// Whether an ADD that fails so fails because of the node, so that other pods fail there too.
    #[must_use]
    pub const fn is_of_node(self) -> bool {
        match self {
            Self::IncompatibleVersion
            | Self::Io
            | Self::Decode
            | Self::Config
            | Self::NotAvailable
            | Self::LimitedConnectivity => true,
            // A pod may ask for what this node alone cannot do, and no tenant shall make a node unready. What all pods need of the kernel
            // the plugin's STATUS says.
            Self::NotProgrammed
            | Self::Internal
            // Whether the API server serves the plugin is asked of the API server; a namespace may go while ADD looks for it.
            | Self::TryAgain
            | Self::Forbidden
            | Self::Untrusted
            | Self::Kubeconfig
            | Self::Environment
            | Self::Pod
            | Self::Sandboxed
            | Self::NotEnrolled
            | Self::NotAsPlanned => false,
        }
    }

    /// The number in the error object.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// A failure as it is reported to the runtime.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}{}", if details.is_empty() { String::new() } else { format!(" ({details})") })]
pub struct CniError {
    /// What kind.
    pub code: Code,
    /// What is wrong, where, and with which value.
    pub message: String,
    /// What to do about it; may be empty.
    pub details: String,
}

impl CniError {
    /// An error without details.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: String::new() }
    }

    /// The error with a remedy.
    #[must_use]
    pub fn with_details(self, details: impl Into<String>) -> Self {
        Self { details: details.into(), ..self }
    }

    /// An error that stands for several problems, all named.
    #[must_use]
    pub fn of_problems(code: Code, problems: &[String]) -> Self {
        Self::new(code, problems.join("; "))
    }

    /// The error object, in the configuration's version if that is known.
    #[must_use]
    pub fn json(&self, version: Option<Version>) -> String {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Object<'a> {
            cni_version: &'static str,
            code: u32,
            msg: &'a str,
            #[serde(skip_serializing_if = "str::is_empty")]
            details: &'a str,
        }
        let object = Object {
            cni_version: version.unwrap_or(Version::NEWEST).name(),
            code: self.code.number(),
            msg: shortened(&self.message),
            details: shortened(&self.details),
        };
        serde_json::to_string(&object).unwrap_or_else(|error| format!(r#"{{"code":199,"msg":"{error}"}}"#))
    }
}

/// The beginning of a text that another program may have made long: a runtime puts it into events, logs and statuses.
fn shortened(text: &str) -> &str {
    const LONGEST: usize = 2048;
    let end =
        text.char_indices().map(|(index, c)| index + c.len_utf8()).take_while(|end| *end <= LONGEST).last();
    text.get(..end.unwrap_or_default()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_is_longer_than_a_runtime_can_use() {
        let error = CniError::new(Code::NotAsPlanned, "ä".repeat(3000)).with_details("b".repeat(3000));
        let object: serde_json::Value = serde_json::from_str(&error.json(None)).unwrap();
        let (message, details) = (object["msg"].as_str().unwrap(), object["details"].as_str().unwrap());
        assert_eq!((message.chars().count(), details.len()), (1024, 2048));
    }

    #[test]
    fn a_code_has_one_number() {
        for (code, _) in Code::ALL {
            assert_eq!(Code::of(code.number().into()), Some(code));
        }
        assert_eq!(Code::of(200), None);
    }

    #[test]
    fn the_object_has_the_fields_of_the_specification() {
        let error = CniError::new(Code::TryAgain, "a \"quoted\"\nthing");
        assert_eq!(
            error.json(Some(Version::OLDEST)),
            r#"{"cniVersion":"0.1.0","code":11,"msg":"a \"quoted\"\nthing"}"#
        );
        assert_eq!(
            error.with_details("wait").json(None),
            r#"{"cniVersion":"1.1.0","code":11,"msg":"a \"quoted\"\nthing","details":"wait"}"#
        );
    }
}
