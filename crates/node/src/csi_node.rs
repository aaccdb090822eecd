//! Adds drivers to, and removes them from, the CSINode and the Node (node id annotation and topology labels). It writes with
//! optimistic concurrency.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::key::Meta as _;
use cleat_api::well_known::annotation::NODE_CSI_IDS;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, VolumeNodeResources};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::context::AgentContext;
use crate::drivers::DriverNodeInfo;

/// The number of writes after which an update with conflicts fails. The caller repeats it with backoff.
const MAX_WRITE_ATTEMPTS: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum CsiNodeError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("node {0} does not exist")]
    NoNode(String),
    #[error("node label {key} is {has:?}, the driver's topology says {wants:?}")]
    LabelConflict { key: String, has: String, wants: String },
    #[error("{object} was written by others too often")]
    TooManyConflicts { object: &'static str },
}

pub(crate) async fn add_driver(agent: &AgentContext, driver: &DriverNodeInfo) -> Result<(), CsiNodeError> {
    // One update at a time: updates for drivers that start together would conflict with each other.
    let _guard = agent.csi_node_lock.lock().await;
    let node = update_node(agent, &driver.name, Some(driver)).await?;
    update_csi_node(agent, &node, &driver.name, Some(driver)).await
}

/// Creates the CSINode without drivers, or replaces one that belongs to an earlier Node of the same name.
pub(crate) async fn ensure_csi_node(agent: &AgentContext, node: &Node) -> Result<(), CsiNodeError> {
    let _guard = agent.csi_node_lock.lock().await;
    update_csi_node(agent, node, "", None).await
}

/// The topology labels stay: other drivers may share them, and volumes on this node depend on them.
pub(crate) async fn remove_driver(agent: &AgentContext, name: &str) -> Result<(), CsiNodeError> {
    let _guard = agent.csi_node_lock.lock().await;
    let node = match update_node(agent, name, None).await {
        Err(CsiNodeError::NoNode(_)) => return Ok(()),
        node => node?,
    };
    update_csi_node(agent, &node, name, None).await
}

async fn update_node(
    agent: &AgentContext,
    name: &str,
    driver: Option<&DriverNodeInfo>,
) -> Result<Arc<Node>, CsiNodeError> {
    let key = Key::cluster(&agent.name);
    for _ in 0..MAX_WRITE_ATTEMPTS {
        let found: Option<Node> = write::get_live(&agent.client, &key).await?;
        let node = found.ok_or_else(|| CsiNodeError::NoNode(agent.name.clone()))?;
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
    Err(CsiNodeError::TooManyConflicts { object: "Node" })
}

/// Returns the merge patch for the Node, or `None` if it is up to date.
fn node_patch(
    node: &Node,
    name: &str,
    driver: Option<&DriverNodeInfo>,
) -> Result<Option<serde_json::Value>, CsiNodeError> {
    let json = node.metadata.annotation(NODE_CSI_IDS);
    let mut ids: BTreeMap<String, String> = json.and_then(|t| serde_json::from_str(t).ok()).unwrap_or_default();
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
                return Err(CsiNodeError::LabelConflict { key: key.clone(), has: has.clone(), wants: wants.clone() });
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
    agent: &AgentContext,
    node: &Node,
    name: &str,
    driver: Option<&DriverNodeInfo>,
) -> Result<(), CsiNodeError> {
    let key = Key::cluster(&agent.name);
    for _ in 0..MAX_WRITE_ATTEMPTS {
        let found: Option<CSINode> = write::get_live(&agent.client, &key).await?;
        let written = match found {
            None => write::create(&agent.client, &csi_node(node, driver)).await,
            // It belongs to an earlier Node of the same name.
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
    Err(CsiNodeError::TooManyConflicts { object: "CSINode" })
}

fn csi_node(node: &Node, driver: Option<&DriverNodeInfo>) -> CSINode {
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

/// Returns whether the list has changed.
fn set_driver(drivers: &mut Vec<CSINodeDriver>, name: &str, driver: Option<&DriverNodeInfo>) -> bool {
    let wanted = driver.map(entry);
    if drivers.iter().find(|d| d.name == name) == wanted.as_ref() {
        return false;
    }
    drivers.retain(|d| d.name != name);
    drivers.extend(wanted);
    true
}

fn entry(driver: &DriverNodeInfo) -> CSINodeDriver {
    let keys: BTreeSet<String> = driver.topology.keys().cloned().collect();
    // 0 means that the driver sets no limit; an invalid negative number is treated the same.
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

    fn driver_info(max_volumes: i64) -> DriverNodeInfo {
        let topology = BTreeMap::from([("topology.cleat.dev/node".to_owned(), "n1".to_owned())]);
        DriverNodeInfo { name: "d".into(), node_id: "id-1".into(), max_volumes, topology }
    }

    #[test]
    fn the_node_gets_id_and_topology_once() {
        let mut node = build::node("n1");
        let patch = node_patch(&node, "d", Some(&driver_info(0))).unwrap().unwrap();
        assert_eq!(patch["metadata"]["annotations"][NODE_CSI_IDS], "{\"d\":\"id-1\"}");
        assert_eq!(patch["metadata"]["labels"]["topology.cleat.dev/node"], "n1");

        build::annotate(&mut node.metadata, NODE_CSI_IDS, "{\"d\":\"id-1\"}");
        node.metadata.labels = Some(driver_info(0).topology);
        assert_eq!(node_patch(&node, "d", Some(&driver_info(0))).unwrap(), None, "nothing new");

        let patch = node_patch(&node, "d", None).unwrap().unwrap();
        assert!(
            patch["metadata"]["annotations"][NODE_CSI_IDS].is_null(),
            "the annotation is removed with the last driver"
        );

        node.metadata.labels.as_mut().unwrap().insert("topology.cleat.dev/node".into(), "n9".into());
        assert!(matches!(node_patch(&node, "d", Some(&driver_info(0))), Err(CsiNodeError::LabelConflict { .. })));
    }

    #[test]
    fn csi_node_entries_are_replaced_not_duplicated() {
        let mut drivers = Vec::new();
        assert!(set_driver(&mut drivers, "d", Some(&driver_info(0))));
        assert_eq!(drivers[0].allocatable, None);
        assert!(!set_driver(&mut drivers, "d", Some(&driver_info(-1))), "no limit either way");
        assert!(set_driver(&mut drivers, "d", Some(&driver_info(i64::MAX))));
        assert_eq!(drivers[0].allocatable.as_ref().unwrap().count, Some(i32::MAX));
        assert_eq!(drivers.len(), 1);
        assert!(set_driver(&mut drivers, "d", None) && drivers.is_empty());
    }

    #[test]
    fn a_csi_node_of_an_earlier_node_is_recognized() {
        let node = build::node("n1");
        assert!(is_owned_by(&csi_node(&node, None), &node));
        let mut later = node.clone();
        later.metadata.uid = Some("later".into());
        assert!(!is_owned_by(&csi_node(&node, None), &later));
    }
}
