//! A driver's entry in the CSINode and on the Node object. Writes with optimistic concurrency; several drivers may come at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::key::Meta as _;
use cleat_api::well_known::annotation::NODE_CSI_IDS;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, VolumeNodeResources};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::agent::Shared;

/// A lost race means that somebody else made progress; this many in a row mean something else.
const MOST_RACES: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("node {0} does not exist")]
    NoNode(String),
    #[error("node label {key} is {has:?}, the driver's topology says {wants:?}")]
    Label { key: String, has: String, wants: String },
    #[error("{object} was written by others too often")]
    Races { object: &'static str },
}

/// What a driver says about itself on this node.
#[derive(Clone, Debug)]
pub(crate) struct Announced {
    pub(crate) name: String,
    pub(crate) node_id: String,
    pub(crate) max_volumes: i64,
    pub(crate) topology: BTreeMap<String, String>,
}

pub(crate) async fn enter(agent: &Shared, driver: &Announced) -> Result<(), RegistryError> {
    // One at a time in this process: two drivers that start together would only lose races to each other.
    let _turn = agent.registry.lock().await;
    let node = update_node(agent, &driver.name, Some(driver)).await?;
    update_csi_node(agent, &node, &driver.name, Some(driver)).await
}

/// Makes the CSINode, without any driver yet, or replaces one that describes an earlier machine of this name.
pub(crate) async fn prepare(agent: &Shared, node: &Node) -> Result<(), RegistryError> {
    let _turn = agent.registry.lock().await;
    update_csi_node(agent, node, "", None).await
}

/// Topology labels stay: other drivers may share them, and volumes on this node depend on them.
pub(crate) async fn leave(agent: &Shared, name: &str) -> Result<(), RegistryError> {
    let _turn = agent.registry.lock().await;
    let node = match update_node(agent, name, None).await {
        Err(RegistryError::NoNode(_)) => return Ok(()),
        node => node?,
    };
    update_csi_node(agent, &node, name, None).await
}

async fn update_node(agent: &Shared, name: &str, driver: Option<&Announced>) -> Result<Arc<Node>, RegistryError> {
    let key = Key::cluster(&agent.name);
    for _ in 0..MOST_RACES {
        let found: Option<Node> = write::get_live(&agent.client, &key).await?;
        let node = found.ok_or_else(|| RegistryError::NoNode(agent.name.clone()))?;
        let Some(patch) = node_patch(&node, name, driver)? else { return Ok(node.into()) };
        match write::merge::<Node>(&agent.client, Part::Whole, &key, &patch).await {
            Ok(written) => {
                agent.nodes.observe_write(written.clone());
                return Ok(written);
            }
            Err(error) if error.is_conflict() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(RegistryError::Races { object: "Node" })
}

/// The change to the Node, if one is needed.
fn node_patch(node: &Node, name: &str, driver: Option<&Announced>) -> Result<Option<serde_json::Value>, RegistryError> {
    let text = node.metadata.annotation(NODE_CSI_IDS);
    let mut ids: BTreeMap<String, String> = text.and_then(|t| serde_json::from_str(t).ok()).unwrap_or_default();
    let before = ids.clone();
    match driver {
        Some(driver) => ids.insert(name.to_owned(), driver.node_id.clone()),
        None => ids.remove(name),
    };
    let mut labels = BTreeMap::new();
    for (key, wants) in driver.iter().flat_map(|d| &d.topology) {
        match node.metadata.labels.as_ref().and_then(|l| l.get(key)) {
            Some(has) if has == wants => {}
            Some(has) => {
                return Err(RegistryError::Label { key: key.clone(), has: has.clone(), wants: wants.clone() });
            }
            None => {
                labels.insert(key, wants);
            }
        }
    }
    if ids == before && labels.is_empty() {
        return Ok(None);
    }
    let ids = if ids.is_empty() { None } else { Some(serde_json::json!(ids).to_string()) };
    Ok(Some(serde_json::json!({
        "metadata": {
            "resourceVersion": node.metadata.resource_version,
            "annotations": { NODE_CSI_IDS: ids },
            "labels": labels,
        }
    })))
}

async fn update_csi_node(
    agent: &Shared,
    node: &Node,
    name: &str,
    driver: Option<&Announced>,
) -> Result<(), RegistryError> {
    let key = Key::cluster(&agent.name);
    for _ in 0..MOST_RACES {
        let found: Option<CSINode> = write::get_live(&agent.client, &key).await?;
        let written = match found {
            None => write::create(&agent.client, &csi_node(node, driver)).await,
            // It describes an earlier machine of this name.
            Some(old) if !is_owned_by(&old, node) => {
                write::delete(&agent.client, &old).await?;
                continue;
            }
            Some(mut current) => {
                if !set_driver(&mut current.spec.drivers, name, driver) {
                    return Ok(());
                }
                write::replace(&agent.client, Part::Whole, &current).await
            }
        };
        match written {
            Ok(_) => return Ok(()),
            Err(error) if error.is_conflict() || error.already_exists() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(RegistryError::Races { object: "CSINode" })
}

fn csi_node(node: &Node, driver: Option<&Announced>) -> CSINode {
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.metadata.name.clone().unwrap_or_default(),
        uid: node.metadata.uid().to_owned(),
        ..OwnerReference::default()
    };
    CSINode {
        metadata: ObjectMeta {
            name: node.metadata.name.clone(),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: CSINodeSpec { drivers: driver.map(entry).into_iter().collect() },
        ..CSINode::default()
    }
}

fn is_owned_by(csi_node: &CSINode, node: &Node) -> bool {
    let mut owners = csi_node.metadata.owner_references.iter().flatten().filter(|o| o.kind == "Node").peekable();
    owners.peek().is_none() || owners.any(|o| o.uid == node.metadata.uid())
}

/// Whether the list changed.
fn set_driver(drivers: &mut Vec<CSINodeDriver>, name: &str, driver: Option<&Announced>) -> bool {
    let wanted = driver.map(entry);
    if drivers.iter().find(|d| d.name == name) == wanted.as_ref() {
        return false;
    }
    drivers.retain(|d| d.name != name);
    drivers.extend(wanted);
    true
}

fn entry(driver: &Announced) -> CSINodeDriver {
    let keys: BTreeSet<String> = driver.topology.keys().cloned().collect();
    // None and nonsense both mean "no limit".
    let count = (driver.max_volumes > 0).then(|| i32::try_from(driver.max_volumes).unwrap_or(i32::MAX));
    CSINodeDriver {
        name: driver.name.clone(),
        node_id: driver.node_id.clone(),
        topology_keys: Some(keys.into_iter().collect()).filter(|keys: &Vec<String>| !keys.is_empty()),
        allocatable: count.map(|count| VolumeNodeResources { count: Some(count) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

    fn announced(max_volumes: i64) -> Announced {
        let topology = BTreeMap::from([("topology.cleat.dev/node".to_owned(), "n1".to_owned())]);
        Announced { name: "d".into(), node_id: "id-1".into(), max_volumes, topology }
    }

    #[test]
    fn the_node_learns_id_and_topology_once() {
        let mut node = build::node("n1");
        let patch = node_patch(&node, "d", Some(&announced(0))).unwrap().unwrap();
        assert_eq!(patch["metadata"]["annotations"][NODE_CSI_IDS], "{\"d\":\"id-1\"}");
        assert_eq!(patch["metadata"]["labels"]["topology.cleat.dev/node"], "n1");

        build::annotate(&mut node.metadata, NODE_CSI_IDS, "{\"d\":\"id-1\"}");
        node.metadata.labels = Some(announced(0).topology);
        assert_eq!(node_patch(&node, "d", Some(&announced(0))).unwrap(), None, "nothing new");

        let patch = node_patch(&node, "d", None).unwrap().unwrap();
        assert!(patch["metadata"]["annotations"][NODE_CSI_IDS].is_null(), "the last driver takes the annotation along");

        node.metadata.labels.as_mut().unwrap().insert("topology.cleat.dev/node".into(), "n9".into());
        assert!(matches!(node_patch(&node, "d", Some(&announced(0))), Err(RegistryError::Label { .. })));
    }

    #[test]
    fn csi_node_entries_are_replaced_not_doubled() {
        let mut drivers = Vec::new();
        assert!(set_driver(&mut drivers, "d", Some(&announced(0))));
        assert_eq!(drivers[0].allocatable, None);
        assert!(!set_driver(&mut drivers, "d", Some(&announced(-1))), "no limit either way");
        assert!(set_driver(&mut drivers, "d", Some(&announced(i64::MAX))));
        assert_eq!(drivers[0].allocatable.as_ref().unwrap().count, Some(i32::MAX));
        assert_eq!(drivers.len(), 1);
        assert!(set_driver(&mut drivers, "d", None) && drivers.is_empty());
    }

    #[test]
    fn a_csi_node_of_an_earlier_machine_is_recognised() {
        let node = build::node("n1");
        assert!(is_owned_by(&csi_node(&node, None), &node));
        let mut later = node.clone();
        later.metadata.uid = Some("later".into());
        assert!(!is_owned_by(&csi_node(&node, None), &later));
    }
}
