//! What kinds of objects a server has, and under which paths, as it says itself.

use std::fmt::Display;
use std::sync::PoisonError;

use anyhow::{Context, Result};
use cluster_client::ApiError;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ApiServer, Sending};

/// The form of answer that has all groups and versions in one.
const ALL_IN_ONE: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// What a server has, the preferred version of each resource first.
#[derive(Debug)]
pub(super) struct Resources(Vec<Resource>);

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Resource {
    /// As an object has it: the version, behind the group where it has one.
    #[serde(skip)]
    api_version: String,
    /// Its name in paths.
    resource: String,
    /// `kind` and more.
    response_kind: Value,
    scope: String,
    singular_resource: String,
}

impl Resources {
    /// Asks a server.
    pub(super) fn of(api: &ApiServer) -> Result<Self> {
        let mut all = Vec::new();
        for path in ["/api", "/apis"] {
            let answer = api.text(&Sending::get(path).accepting(ALL_IN_ONE))?;
            let mut groups: Value = serde_json::from_str(&answer)?;
            for group in groups["items"].as_array_mut().context("no groups")? {
                let name =
                    group["metadata"]["name"].as_str().map(|name| format!("{name}/")).unwrap_or_default();
                for version in group["versions"].as_array_mut().context("no versions")? {
                    let api_version = format!("{name}{}", version["version"].as_str().context("no name")?);
                    let resources: Vec<Resource> = serde_json::from_value(version["resources"].take())?;
                    let of_version = |one| Resource { api_version: api_version.clone(), ..one };
                    all.extend(resources.into_iter().map(of_version));
                }
            }
        }
        Ok(Self(all))
    }

    /// The path of all objects of a kind, called as kubectl calls it: `pod` or `pods`. Namespace "" for all namespaces, and for what is in none.
    pub(super) fn path(&self, called: &str, namespace: &str) -> Option<String> {
        let is_called = |one: &&Resource| one.resource == called || one.singular_resource == called;
        Some(self.0.iter().find(is_called)?.path(namespace))
    }

    /// The path of an object, in the namespace `default` if it names none.
    pub(super) fn path_of(&self, object: &Value) -> Option<String> {
        let is_of_kind = |one: &&Resource| {
            object["apiVersion"] == one.api_version && object["kind"] == one.response_kind["kind"]
        };
        let metadata = &object["metadata"];
        let all = self.0.iter().find(is_of_kind)?.path(metadata["namespace"].as_str().unwrap_or("default"));
        Some(format!("{all}/{}", metadata["name"].as_str()?))
    }
}

impl Resource {
    fn path(&self, namespace: &str) -> String {
        let Self { api_version, resource, scope, .. } = self;
        let root = if api_version.contains('/') { "apis" } else { "api" };
        if namespace.is_empty() || scope != "Namespaced" {
            format!("/{root}/{api_version}/{resource}")
        } else {
            format!("/{root}/{api_version}/namespaces/{namespace}/{resource}")
        }
    }
}

impl ApiServer {
    /// Creates or changes objects given as YAML or JSON, in one document or several, by force.
    pub fn apply(&self, objects: &str) -> Result<()> {
        let documents: Vec<Value> = match serde_json::from_str(objects) {
            Ok(one) => vec![one],
            Err(_) => serde_saphyr::from_multiple(objects).context("the objects are not YAML")?,
        };
        documents.iter().filter(|object| !object.is_null()).try_for_each(|object| self.apply_object(object))
    }

    fn apply_object(&self, object: &Value) -> Result<()> {
        if object["kind"] == "List" {
            let items = object["items"].as_array().context("a list without items")?;
            return items.iter().try_for_each(|item| self.apply_object(item));
        }
        self.send(&Sending::apply(&self.path_of(object)?, object, true)).map(drop)
    }

    /// Creates an object and returns it as the server has it. What another program has set otherwise is an error.
    pub fn create(&self, object: &Value) -> Result<Value> {
        self.send(&Sending::apply(&self.path_of(object)?, object, false))
    }

    /// Makes the status of an object that exists be as in this one.
    pub fn apply_status(&self, object: &Value) -> Result<()> {
        self.send(&Sending::apply(&format!("{}/status", self.path_of(object)?), object, true)).map(drop)
    }

    /// Reads one object: `kind` as kubectl calls it. Namespace "" for what has none.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> Result<Value> {
        self.send(&Sending::get(&format!("{}/{name}", self.path(kind, namespace)?)))
    }

    /// The same for an object that may not exist.
    pub fn find(&self, kind: &str, namespace: &str, name: &str) -> Result<Option<Value>> {
        match self.get(kind, namespace, name) {
            Err(error) if matches!(error.downcast_ref(), Some(ApiError::NotFound(words)) if words.by_api) => {
                Ok(None)
            }
            found => found.map(Some),
        }
    }

    /// Lists objects of a kind, or of several with commas between them, in a namespace, or in all if the namespace is "".
    pub fn list(&self, kinds: &str, namespace: &str) -> Result<Vec<Value>> {
        let mut all = Vec::new();
        for kind in kinds.split(',') {
            let mut list = self.send(&Sending::get(&self.path(kind, namespace)?))?;
            let (version, kind) = (list["apiVersion"].take(), list["kind"].take());
            let kind = json!(kind.as_str().unwrap_or_default().trim_end_matches("List"));
            let items: Vec<Value> = serde_json::from_value(list["items"].take()).context("no list")?;
            // In a list, objects do not say what they are.
            all.extend(items.into_iter().map(|mut object| {
                object["apiVersion"] = version.clone();
                object["kind"] = kind.clone();
                object
            }));
        }
        Ok(all)
    }

    /// Deletes an object as kubectl does, and does not wait until it is gone.
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) -> Result<()> {
        let path = format!("{}/{name}", self.path(kind, namespace)?);
        self.send(&Sending::delete_in_its_time(&path)).map(drop)
    }

    /// Deletes an object at once, whatever it is at.
    pub fn delete_now(&self, kind: &str, namespace: &str, name: &str) -> Result<()> {
        let path = format!("{}/{name}", self.path(kind, namespace)?);
        self.send(&Sending::delete(&path)).map(drop)
    }

    /// Deletes all objects of a kind in a namespace at once.
    pub fn delete_all(&self, kind: &str, namespace: &str) -> Result<()> {
        self.send(&Sending::delete(&self.path(kind, namespace)?)).map(drop)
    }

    fn path_of(&self, object: &Value) -> Result<String> {
        self.known(object, |resources| resources.path_of(object))
    }

    fn path(&self, kind: &str, namespace: &str) -> Result<String> {
        self.known(kind, |resources| resources.path(kind, namespace))
    }

    /// The path of this among the server's resources: those it had when it was last asked, else those it has now.
    fn known(
        &self,
        this: impl Display,
        mut path: impl FnMut(&Resources) -> Option<String>,
    ) -> Result<String> {
        let mut known = self.resources.lock().unwrap_or_else(PoisonError::into_inner);
        match known.as_ref().and_then(&mut path) {
            Some(found) => Ok(found),
            None => path(known.insert(Resources::of(self)?)).with_context(|| format!("no such kind: {this}")),
        }
    }
}
