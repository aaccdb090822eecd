//! Which change of a cached object wakes which pod, volume or the node. Subscribers only add work items to the queues.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use cleat_api::key::Meta as _;
use cleat_api::{Key, names};
use cleat_runtime::Change;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};

use crate::context::AgentContext;
use crate::layout::VolumeId;

/// Subscribes to all caches. A cache has no unsubscribe and outlives the agent if several agents share it, so each
/// subscriber holds only a weak reference to the agent.
pub(crate) fn subscribe(agent: &Arc<AgentContext>) {
    agent.pods.subscribe(weakly(agent, |agent, change: &Change<Pod>| {
        let pod = change.object();
        if agent.is_on_this_node(pod) {
            let uid = pod.metadata.uid().to_owned();
            if let Change::Applied { .. } = change {
                agent.state.lock().pod_keys.insert(uid.clone(), Key::of(&pod.metadata));
            }
            agent.wake_pod(uid);
        }
    }));
    agent.claims.subscribe(weakly(agent, |agent, change: &Change<PersistentVolumeClaim>| {
        let pods = agent.state.lock().pods_by_claim.pods(&Key::of(&change.object().metadata));
        pods.into_iter().for_each(|uid| agent.wake_pod(uid));
    }));
    agent.volumes.subscribe(weakly(agent, |agent, change: &Change<PersistentVolume>| {
        let name = change.object().metadata.name.clone().unwrap_or_default();
        let pods = agent.state.lock().pods_by_volume.pods(&name);
        pods.into_iter().for_each(|uid| agent.wake_pod(uid));
    }));
    agent.attachments.subscribe(weakly(agent, |agent, change: &Change<VolumeAttachment>| {
        let attachment = change.object();
        if attachment.spec.node_name == agent.name {
            let name = attachment.metadata.name.as_deref().unwrap_or_default();
            let id = agent.state.lock().volume_by_attachment(name);
            id.into_iter().for_each(|id| agent.wake_volume(id));
        }
    }));
    agent.nodes.subscribe(weakly(agent, node_changed));
    agent.csi_drivers.subscribe(weakly(agent, |agent, change: &Change<CSIDriver>| {
        let name = change.object().metadata.name.as_deref().unwrap_or_default();
        let (pods, volumes) = {
            let state = agent.state.lock();
            (state.all_pods(), state.volumes_of_driver(name))
        };
        pods.into_iter().for_each(|uid| agent.wake_pod(uid));
        volumes.into_iter().for_each(|id| agent.wake_volume(id));
        agent.wake_node();
    }));
}

fn weakly<K>(
    agent: &Arc<AgentContext>,
    notify: impl Fn(&AgentContext, &Change<K>) + Send + Sync + 'static,
) -> impl Fn(&Change<K>) + Send + Sync + 'static {
    let agent: Weak<AgentContext> = Arc::downgrade(agent);
    move |change| {
        if let Some(agent) = agent.upgrade() {
            notify(&agent, change);
        }
    }
}

/// Wakes the node if the Node was replaced or deleted, and the volumes that entered or left `volumesAttached`. The
/// agent itself writes the other fields.
fn node_changed(agent: &AgentContext, change: &Change<Node>) {
    if change.object().metadata.name.as_deref() != Some(agent.name.as_str()) {
        return;
    }
    let (old, new) = match change {
        Change::Applied { old, new } => {
            if new.metadata.uid != *agent.registered_node_uid.lock() {
                agent.wake_node();
            }
            (old.as_ref().map(|n| attached_volumes(n)).unwrap_or_default(), attached_volumes(new))
        }
        Change::Deleted(last) => {
            agent.state.lock().clear_reported();
            agent.wake_node();
            (attached_volumes(last), BTreeSet::new())
        }
    };
    for name in old.symmetric_difference(&new) {
        match names::split_unique_volume_name(name) {
            Some((driver, handle)) => agent.wake_volume(VolumeId::new(driver, handle)),
            None => {
                let volumes = agent.state.lock().all_volumes();
                volumes.into_iter().for_each(|id| agent.wake_volume(id));
            }
        }
    }
}

/// The unique names of the volumes in `volumesAttached`.
fn attached_volumes(node: &Node) -> BTreeSet<String> {
    let all = node.status.iter().flat_map(|s| s.volumes_attached.iter().flatten());
    all.map(|a| a.name.clone()).collect()
}
