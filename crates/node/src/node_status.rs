//! The Node, with its labels, conditions and `volumesInUse`, and the node's Lease.
//!
//! A volume is added to `volumesInUse` before it is staged, and removed only after it was unstaged: the attach/detach
//! controller does not detach a volume that is listed there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleat_api::Key;
use cleat_api::condition::node_ready;
use cleat_api::well_known::{annotation, label};
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Namespace, Node, NodeAddress, NodeCondition, NodeStatus, NodeSystemInfo};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use serde_json::json;
use tracing::{debug, info, warn};

use crate::context::AgentContext;
use crate::csi_node::{self, CsiNodeError};
use crate::error::ReconcileError;
use crate::layout::VolumeId;

const LEASE_NAMESPACE: &str = "kube-node-lease";
const LEASE_DURATION_SECONDS: i32 = 40;
const LEASE_RENEW_INTERVAL: Duration = Duration::from_secs(10);
/// The Kubernetes release whose behaviour the agent follows, with the version of Cleat.
const KUBELET_VERSION: &str = concat!("v1.37.0-cleat.", env!("CARGO_PKG_VERSION"));

/// Creates the Node if it does not exist, and updates its labels, annotations, status, CSINode and drivers. The status
/// contains `volumesInUse` with the volumes that were reconstructed from disk.
pub(crate) async fn register(agent: &AgentContext) -> Result<(), CsiNodeError> {
    let key = Key::cluster(&agent.name);
    let labels = BTreeMap::from([
        (label::HOSTNAME.to_owned(), agent.name.clone()),
        (label::OS.to_owned(), "linux".to_owned()),
        (label::ARCH.to_owned(), architecture().to_owned()),
    ]);
    let annotations = BTreeMap::from([(annotation::CONTROLLER_MANAGED_ATTACH.to_owned(), "true".to_owned())]);
    let metadata = ObjectMeta {
        name: Some(agent.name.clone()),
        labels: Some(labels.clone()),
        annotations: Some(annotations.clone()),
        ..ObjectMeta::default()
    };
    let node = match write::get_live::<Node>(&agent.client, &key).await? {
        Some(node) => {
            let patch = json!({ "metadata": { "labels": labels, "annotations": annotations } });
            let has =
                |m: &ObjectMeta| includes(m.labels.as_ref(), &labels) && includes(m.annotations.as_ref(), &annotations);
            if has(&node.metadata) {
                node.into()
            } else {
                write::merge::<Node>(&agent.client, Part::Whole, &key, &patch).await?
            }
        }
        None => {
            info!(node = agent.name, "creating the Node");
            // The new Node must list its volumes in use from the start; otherwise the attach/detach controller could
            // detach mounted volumes.
            let status = NodeStatus {
                volumes_in_use: Some(reportable_volumes(agent).into_iter().collect()),
                ..NodeStatus::default()
            };
            write::create(&agent.client, &Node { metadata, status: Some(status), ..Node::default() }).await?
        }
    };
    let status = full_status(agent, &node).await;
    write_status(agent, Some(&node), status).await?;
    csi_node::ensure_csi_node(agent, &node).await?;
    for driver in agent.drivers.all_node_info() {
        csi_node::add_driver(agent, &driver).await?;
    }
    *agent.registered_node_uid.lock() = node.metadata.uid.clone();
    Ok(())
}

fn includes(has: Option<&BTreeMap<String, String>>, wants: &BTreeMap<String, String>) -> bool {
    wants.iter().all(|(k, v)| has.and_then(|h| h.get(k)) == Some(v))
}

/// Writes `volumesInUse` if it has changed, and registers the node again if its Node was deleted or replaced.
pub(crate) async fn reconcile(agent: Arc<AgentContext>) -> Result<Outcome, ReconcileError> {
    let registered = agent.registered_node_uid.lock().clone();
    match agent.nodes.named(&agent.name).filter(|node| node.metadata.uid == registered) {
        // The node lifecycle controller has set Ready to Unknown while this process was paused; only the agent sets it
        // to True.
        Some(node) if node_ready(&node) == Some("Unknown") => {
            let status = full_status(&agent, &node).await;
            write_status(&agent, Some(&node), status).await?;
        }
        Some(node) => write_status(&agent, Some(&node), json!({})).await?,
        // The Node was deleted or replaced while the agent runs: its labels, status and drivers must be written again.
        None => register(&agent).await?,
    }
    Ok(Outcome::Done)
}

/// The unique names of the volumes that the attach/detach controller must not detach.
fn reportable_volumes(agent: &AgentContext) -> BTreeSet<String> {
    let volumes = agent.state.lock().begin_report();
    let attachable = volumes.iter().filter(|id| agent.attach_required(&id.driver));
    let mut in_use: BTreeSet<String> = attachable.map(VolumeId::unique_name).collect();
    in_use.extend(agent.retained_in_use.get().into_iter().flatten().cloned());
    in_use
}

/// Writes `status` with the current `volumesInUse`, unless `status` is empty and `node` lists them already. Wakes the
/// volumes that the server has acknowledged for the first time.
async fn write_status(
    agent: &AgentContext,
    node: Option<&Node>,
    mut status: serde_json::Value,
) -> Result<(), WriteError> {
    let in_use = reportable_volumes(agent);
    let reported: BTreeSet<String> = node.map(volumes_in_use).unwrap_or_default();
    let unchanged = reported == in_use && status.as_object().is_none_or(serde_json::Map::is_empty);
    let acknowledged = if unchanged {
        reported
    } else {
        status["volumesInUse"] = json!(in_use);
        let key = Key::cluster(&agent.name);
        let patch = json!({ "status": status });
        let written = write::merge::<Node>(&agent.client, Part::Status, &key, &patch).await?;
        let acknowledged = volumes_in_use(&written);
        agent.nodes.observe_write(written);
        debug!(volumes = in_use.len(), "volumes in use reported");
        if in_use.difference(&reported).next().is_some() {
            cleat_crash::point("node:in-use-reported");
        }
        if reported.difference(&in_use).next().is_some() {
            cleat_crash::point("node:in-use-dropped");
        }
        acknowledged
    };
    let acknowledged_volumes = agent.state.lock().end_report(&acknowledged);
    for id in acknowledged_volumes {
        agent.wake_volume(id);
    }
    Ok(())
}

pub(crate) fn volumes_in_use(node: &Node) -> BTreeSet<String> {
    node.status.iter().flat_map(|s| s.volumes_in_use.iter().flatten()).cloned().collect()
}

/// The status except for `volumesInUse`. Conditions other than Ready are kept.
async fn full_status(agent: &AgentContext, node: &Node) -> serde_json::Value {
    let now = agent.clock.time();
    let others = node.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let mut conditions: Vec<NodeCondition> = others.clone().filter(|c| c.type_ != "Ready").cloned().collect();
    let since = others.into_iter().find(|c| c.type_ == "Ready" && c.status == "True");
    conditions.push(NodeCondition {
        type_: "Ready".to_owned(),
        status: "True".to_owned(),
        reason: Some("KubeletReady".to_owned()),
        message: Some("the node agent handles volumes".to_owned()),
        last_transition_time: since.and_then(|c| c.last_transition_time.clone()).or_else(|| Some(now.clone())),
        last_heartbeat_time: Some(now),
    });
    let address = NodeAddress { type_: "Hostname".to_owned(), address: agent.name.clone() };
    // These read small files of the kernel and the root file system, which do not block on a volume.
    let (info, capacity) = (system_info(), capacity());
    json!({
        "conditions": conditions,
        "addresses": [address],
        "nodeInfo": info,
        "capacity": capacity,
        "allocatable": capacity,
    })
}

fn system_info() -> NodeSystemInfo {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let os_release = read("/etc/os-release");
    let pretty = os_release.lines().find_map(|l| l.strip_prefix("PRETTY_NAME="));
    NodeSystemInfo {
        architecture: architecture().to_owned(),
        boot_id: read("/proc/sys/kernel/random/boot_id"),
        kernel_version: read("/proc/sys/kernel/osrelease"),
        kubelet_version: KUBELET_VERSION.to_owned(),
        machine_id: read("/etc/machine-id"),
        operating_system: "linux".to_owned(),
        os_image: pretty.unwrap_or("Linux").trim_matches('"').to_owned(),
        ..NodeSystemInfo::default()
    }
}

fn capacity() -> BTreeMap<&'static str, String> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = memory.lines().find_map(|l| l.strip_prefix("MemTotal:"));
    let kilobytes = total.and_then(|t| t.split_whitespace().next()).unwrap_or("0");
    BTreeMap::from([("cpu", cpus.to_string()), ("memory", format!("{kilobytes}Ki")), ("pods", "110".to_owned())])
}

/// The architecture in Go's spelling, which Kubernetes uses.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Renews the node's Lease until the agent stops. A failure is logged; the next renewal is the retry. Also wakes the node
/// reconcile if Ready was set to Unknown.
pub(crate) async fn renew_lease(agent: &AgentContext) {
    loop {
        if let Err(error) = write_lease(agent).await {
            warn!(%error, "node lease not renewed");
        }
        if agent.nodes.named(&agent.name).is_some_and(|node| node_ready(&node) == Some("Unknown")) {
            agent.wake_node();
        }
        tokio::select! {
            () = agent.stop.cancelled() => return,
            () = tokio::time::sleep(LEASE_RENEW_INTERVAL) => {}
        }
    }
}

async fn write_lease(agent: &AgentContext) -> Result<(), WriteError> {
    let key = Key::namespaced(LEASE_NAMESPACE, agent.name.clone());
    let now = MicroTime(agent.clock.now());
    let patch = json!({ "spec": {
        "holderIdentity": agent.name, "leaseDurationSeconds": LEASE_DURATION_SECONDS, "renewTime": now,
    }});
    match write::merge::<Lease>(&agent.client, Part::Whole, &key, &patch).await {
        Err(error) if error.is_not_found() => {}
        result => return result.map(drop),
    }
    let lease = Lease {
        metadata: ObjectMeta {
            name: Some(key.name.clone()),
            namespace: key.namespace.clone(),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(agent.name.clone()),
            lease_duration_seconds: Some(LEASE_DURATION_SECONDS),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }),
    };
    match write::create(&agent.client, &lease).await {
        Err(error) if error.is_not_found() => {}
        result => return result.map(drop),
    }
    // The namespace does not exist on this server: create it.
    let namespace = Namespace {
        metadata: ObjectMeta { name: Some(LEASE_NAMESPACE.to_owned()), ..ObjectMeta::default() },
        ..Namespace::default()
    };
    match write::create(&agent.client, &namespace).await {
        Err(error) if !error.already_exists() => return Err(error),
        _ => {}
    }
    write::create(&agent.client, &lease).await.map(drop)
}
