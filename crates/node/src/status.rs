//! The node's own objects: the Node with its labels, conditions and volumesInUse, and the Lease that shows it alive.
//!
//! What is in use is reported before anything may be attached for this node's sake, and given up only after it was unstaged:
//! the attach/detach controller detaches nothing that is listed there.

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

use crate::agent::{Shared, TurnError};
use crate::layout::VolumeId;
use crate::registry::{self, RegistryError};

const LEASE_NAMESPACE: &str = "kube-node-lease";
const LEASE_SECONDS: i32 = 40;
const RENEW_EVERY: Duration = Duration::from_secs(10);
/// What a node without a container runtime can say about itself.
const KUBELET_VERSION: &str = concat!("v1.37.0-cleat.", env!("CARGO_PKG_VERSION"));

/// Makes the Node object if there is none, and brings labels and annotation up to date. The first status write of a run carries
/// what is in use, with everything that was found on disk.
pub(crate) async fn register(agent: &Shared) -> Result<(), RegistryError> {
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
            info!(node = agent.name, "registering the node");
            // A Node that comes back must not look for a moment as if it used nothing: that would detach what is mounted.
            let status =
                NodeStatus { volumes_in_use: Some(used(agent).into_iter().collect()), ..NodeStatus::default() };
            write::create(&agent.client, &Node { metadata, status: Some(status), ..Node::default() }).await?
        }
    };
    let status = first_status(agent, &node).await;
    send(agent, Some(&node), status).await?;
    registry::prepare(agent, &node).await?;
    for driver in agent.drivers.announced() {
        registry::enter(agent, &driver).await?;
    }
    *agent.registered.lock() = node.metadata.uid.clone();
    Ok(())
}

fn includes(has: Option<&BTreeMap<String, String>>, wants: &BTreeMap<String, String>) -> bool {
    wants.iter().all(|(k, v)| has.and_then(|h| h.get(k)) == Some(v))
}

/// Reports what is in use, if the server does not know it already.
pub(crate) async fn turn(agent: Arc<Shared>) -> Result<Outcome, TurnError> {
    let registered = agent.registered.lock().clone();
    match agent.nodes.named(&agent.name).filter(|node| node.metadata.uid == registered) {
        // Taken for dead while we were paused: only we can say that we are back.
        Some(node) if node_ready(&node) == Some("Unknown") => {
            let status = first_status(&agent, &node).await;
            send(&agent, Some(&node), status).await?;
        }
        Some(node) => send(&agent, Some(&node), json!({})).await?,
        // Deleted, or replaced, by somebody while we are alive: what we and the drivers entered there went with it.
        None => register(&agent).await?,
    }
    Ok(Outcome::Done)
}

/// What the attach/detach controller must leave attached.
fn used(agent: &Shared) -> BTreeSet<String> {
    let volumes = agent.state.lock().begin_report();
    let attachable = volumes.iter().filter(|id| agent.attach_required(&id.driver));
    let mut list: BTreeSet<String> = attachable.map(VolumeId::unique_name).collect();
    list.extend(agent.carried.get().into_iter().flatten().cloned());
    list
}

async fn send(agent: &Shared, node: Option<&Node>, mut status: serde_json::Value) -> Result<(), WriteError> {
    let list = used(agent);
    let known: BTreeSet<String> = node.map(in_use).unwrap_or_default();
    let unchanged = known == list && status.as_object().is_none_or(serde_json::Map::is_empty);
    let acknowledged = if unchanged {
        known
    } else {
        status["volumesInUse"] = json!(list);
        let key = Key::cluster(&agent.name);
        let patch = json!({ "status": status });
        let written = write::merge::<Node>(&agent.client, Part::Status, &key, &patch).await?;
        let acknowledged = in_use(&written);
        agent.nodes.observe_write(written);
        debug!(volumes = list.len(), "reported the volumes in use");
        if list.difference(&known).next().is_some() {
            cleat_crash::point("node:in-use-reported");
        }
        if known.difference(&list).next().is_some() {
            cleat_crash::point("node:in-use-dropped");
        }
        acknowledged
    };
    let woken = agent.state.lock().end_report(&acknowledged);
    for id in woken {
        agent.wake_volume(id);
    }
    Ok(())
}

pub(crate) fn in_use(node: &Node) -> BTreeSet<String> {
    node.status.iter().flat_map(|s| s.volumes_in_use.iter().flatten()).cloned().collect()
}

async fn first_status(agent: &Shared, node: &Node) -> serde_json::Value {
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
    // Small kernel files; nothing here can hang on a volume.
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

/// As Kubernetes, that is Go, spells it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Renews the node's Lease until the agent stops. A failure is a warning: the next renewal is the retry.
pub(crate) async fn heartbeat(agent: &Shared) {
    loop {
        if let Err(error) = renew(agent).await {
            warn!(%error, "the node's lease was not renewed");
        }
        if agent.nodes.named(&agent.name).is_some_and(|node| node_ready(&node) == Some("Unknown")) {
            agent.wake_node();
        }
        tokio::select! {
            () = agent.stop.cancelled() => return,
            () = tokio::time::sleep(RENEW_EVERY) => {}
        }
    }
}

async fn renew(agent: &Shared) -> Result<(), WriteError> {
    let key = Key::namespaced(LEASE_NAMESPACE, agent.name.clone());
    let now = MicroTime(agent.clock.now());
    let patch = json!({ "spec": {
        "holderIdentity": agent.name, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": now,
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
            lease_duration_seconds: Some(LEASE_SECONDS),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }),
    };
    match write::create(&agent.client, &lease).await {
        Err(error) if error.is_not_found() => {}
        result => return result.map(drop),
    }
    // A server that does not bring the namespace along.
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
