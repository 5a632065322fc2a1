//! The recorded runs of the reference.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::Value;
use test_support::netns::{Families, Namespace};
use test_support::process::Output;

/// What a recorded run began with.
pub struct Recording {
    /// Its name.
    pub name: String,
    /// The arguments of the program.
    pub args: Vec<String>,
    /// The variables of the program.
    pub env: Vec<(String, String)>,
    /// The families of the namespace.
    pub families: Families,
    /// The name servers of the namespace.
    pub nameservers: Vec<String>,
    /// How this project has to differ from what was recorded, by the list of divergences.
    pub divergence: Option<String>,
    /// All that was recorded.
    pub recorded: Value,
}

impl Recording {
    /// All recorded runs, in their order.
    pub fn all() -> Result<Vec<Self>> {
        let divergences: Value = serde_json::from_str(include_str!("../../fixtures/divergences.json"))?;
        let divergences = divergences["rules"].as_array().context("a list of divergences")?;
        let recorded: Vec<Value> = serde_json::from_str(include_str!("../../fixtures/rules.json"))?;
        recorded.into_iter().map(|recorded| Self::read(recorded, divergences)).collect()
    }

    fn read(recorded: Value, divergences: &[Value]) -> Result<Self> {
        let divergence = divergences.iter().find(|divergence| divergence["case"] == recorded["name"]);
        let divergence = divergence
            .map(|divergence| divergence["expect"].as_str().context("a divergence that expects nothing"));
        let env: Option<BTreeMap<String, String>> = serde_json::from_value(recorded["env"].clone())?;
        let nameservers: Option<Vec<String>> = serde_json::from_value(recorded["nameservers"].clone())?;
        Ok(Self {
            name: recorded["name"].as_str().context("a case without a name")?.to_owned(),
            args: serde_json::from_value(recorded["args"].clone())?,
            env: env.into_iter().flatten().collect(),
            families: Families::from_digits(recorded["families"].as_str().unwrap_or("46"))?,
            nameservers: nameservers.unwrap_or_else(|| vec!["10.96.0.10".to_owned()]),
            divergence: divergence.transpose()?.map(str::to_owned),
            recorded,
        })
    }

    /// Whether the reference succeeded.
    pub fn succeeded(&self) -> bool {
        self.recorded["exit"] == 0
    }

    /// Runs `istio-iptables` as recorded, with more arguments, to its end.
    pub fn run(&self, namespace: &Namespace, more: &[&str]) -> Result<Output> {
        namespace.set_nameservers(&self.nameservers)?;
        let args: Vec<&str> = self.args.iter().map(String::as_str).chain(more.iter().copied()).collect();
        namespace.run(&super::with_environment(super::istio_iptables(), &args, &self.env))
    }
}
