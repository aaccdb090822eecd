//! Reconciles one pod: resolves its volumes, writes its condition, and deletes the Pod when it has terminated and none
//! of its volumes is mounted any more.

use std::sync::Arc;

use cleat_api::condition::{next_pod_condition, pod_condition};
use cleat_api::key::Meta as _;
use cleat_api::well_known::VOLUMES_MOUNTED_CONDITION;
use cleat_api::{Key, pod as api_pod};
use cleat_host::offload;
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, Part, get_live};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::CSIDriver;
use tracing::{debug, info};

use crate::condition::{ConditionUpdate, condition_update};
use crate::context::AgentContext;
use crate::desired::{self, ObjectReader, PodLifecycle};
use crate::error::ReconcileError;
use crate::layout::{FILE_TIMEOUT, PodUid};

pub(crate) async fn reconcile(agent: Arc<AgentContext>, uid: PodUid) -> Result<Outcome, ReconcileError> {
    match observe(&agent, &uid) {
        Some((pod, PodLifecycle::Running | PodLifecycle::Terminating)) => report_condition(&agent, &pod).await?,
        Some((pod, PodLifecycle::Terminated)) => finish_terminated(&agent, &pod).await?,
        None => handle_missing(&agent, &uid).await?,
    }
    Ok(Outcome::Done)
}

/// Resolves the volumes of the cached pod and updates the state. `None` if the pod is not in the cache.
pub(crate) fn observe(agent: &AgentContext, uid: &str) -> Option<(Arc<Pod>, PodLifecycle)> {
    let key = agent.state.lock().pod_keys.get(uid).cloned()?;
    let pod = agent.pods.get(&key).filter(|p| p.metadata.uid() == uid)?;
    let desired_pod = desired::resolve_pod(&pod, &IndexingReader { agent, uid });
    let lifecycle = desired_pod.lifecycle;
    for volume in &desired_pod.volumes {
        if let Err(error) = &volume.spec
            && !error.is_transient()
            && lifecycle == PodLifecycle::Running
        {
            let message = format!("Unable to attach or mount volumes: unmounted volumes=[{}]: {error}", volume.name);
            agent.recorder.warning(&*pod, "FailedMount", message);
        }
    }
    let affected = agent.state.lock().update_pod(desired_pod, &agent.name);
    if !affected.is_empty() {
        agent.wake_node();
    }
    for id in affected {
        agent.wake_volume(id);
    }
    Some((pod, lifecycle))
}

/// Reads objects from the caches and indexes for which pod. It indexes before it reads: otherwise a change between the two
/// would not wake the pod.
struct IndexingReader<'a> {
    agent: &'a AgentContext,
    uid: &'a str,
}

impl ObjectReader for IndexingReader<'_> {
    fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>> {
        self.agent.state.lock().pods_by_claim.add(key.clone(), self.uid);
        self.agent.claims.get(key)
    }

    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.agent.state.lock().pods_by_volume.add(name.to_owned(), self.uid);
        self.agent.volumes.named(name)
    }

    fn driver(&self, name: &str) -> Option<Arc<CSIDriver>> {
        self.agent.csi_drivers.named(name)
    }
}

/// Writes the pod's condition if it has changed.
async fn report_condition(agent: &AgentContext, pod: &Pod) -> Result<(), ReconcileError> {
    let volume_statuses = agent.state.lock().volume_statuses(pod.metadata.uid());
    let (status, reason, message) = match condition_update(&volume_statuses) {
        ConditionUpdate::Unchanged => return Ok(()),
        ConditionUpdate::Mounted => ("True", "VolumesMounted", None),
        ConditionUpdate::NotMounted { reason, message } => ("False", reason, Some(message)),
    };
    let current = pod_condition(pod, VOLUMES_MOUNTED_CONDITION);
    let next = next_pod_condition(
        current,
        VOLUMES_MOUNTED_CONDITION,
        status,
        Some(reason),
        message.as_deref(),
        agent.clock.time(),
    );
    let Some(next) = next else { return Ok(()) };
    let conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let mut conditions: Vec<_> = conditions.filter(|c| c.type_ != VOLUMES_MOUNTED_CONDITION).cloned().collect();
    conditions.push(next);
    // A merge patch replaces the whole list, so the write must fail if the pod has changed since it was read.
    let patch = serde_json::json!({
        "metadata": { "resourceVersion": pod.metadata.resource_version },
        "status": { "conditions": conditions },
    });
    let key = Key::of(&pod.metadata);
    match write::merge::<Pod>(&agent.client, Part::Status, &key, &patch).await {
        Ok(written) => agent.pods.observe_write(written),
        // The pod was deleted in the meantime; the cache will show it soon.
        Err(error) if error.is_not_found() => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    if status == "True" {
        info!(pod = %key, "all volumes mounted");
        cleat_crash::point("node:mounted-reported");
    } else {
        debug!(pod = %key, reason, "volumes not mounted yet");
    }
    Ok(())
}

/// The pod has terminated. Deletes it if it has a deletion timestamp, no finalizers, and no mounted volumes.
async fn finish_terminated(agent: &AgentContext, pod: &Pod) -> Result<(), ReconcileError> {
    let uid = pod.metadata.uid();
    if agent.state.lock().has_volumes(uid) {
        return Ok(());
    }
    remove_directories(agent, uid).await?;
    if !pod.metadata.is_deleting() || pod.metadata.finalizers.as_ref().is_some_and(|f| !f.is_empty()) {
        return Ok(());
    }
    let key = Key::of(&pod.metadata);
    match write::delete_immediately(&agent.client, pod).await {
        Ok(_) => {
            info!(pod = %key, "terminated pod deleted");
            Ok(())
        }
        // Another pod has its name.
        Err(error) if error.is_conflict() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The pod is not in the cache. This does not prove that it is deleted: the server is asked before its volumes are
/// unpublished.
async fn handle_missing(agent: &AgentContext, uid: &str) -> Result<(), ReconcileError> {
    let (key, needs_no_read) = {
        let state = agent.state.lock();
        (state.pod_keys.get(uid).cloned(), state.is_confirmed_gone(uid) || !state.has_volumes(uid))
    };
    let on_server = match &key {
        // It has no volumes, or the server has confirmed its deletion before.
        _ if needs_no_read => None,
        Some(key) => {
            let found: Option<Pod> = get_live(&agent.client, key).await?;
            found.filter(|p| p.metadata.uid() == uid)
        }
        None => find_by_uid(agent, uid).await?,
    };
    if let Some(pod) = on_server {
        let key = Key::of(&pod.metadata);
        agent.state.lock().pod_keys.insert(uid.to_owned(), key.clone());
        return Err(ReconcileError::CacheBehind(key));
    }
    let affected = agent.state.lock().confirm_pod_gone(uid);
    if affected.is_empty() || !agent.state.lock().has_volumes(uid) {
        remove_directories(agent, uid).await?;
    }
    for id in affected {
        agent.wake_volume(id);
    }
    agent.wake_node();
    Ok(())
}

/// Reads a pod whose name is not known, only its uid from the directory on disk.
async fn find_by_uid(agent: &AgentContext, uid: &str) -> Result<Option<Pod>, ReconcileError> {
    let on_this_node = format!("spec.nodeName={}", agent.name);
    let pods: Vec<Pod> = match write::list_by_field(&agent.client, &on_this_node).await {
        // The server does not support this field selector: list all pods.
        Err(error) if error.code() == Some(400) => write::list_all_namespaces(&agent.client).await?,
        pods => pods?,
    };
    let is_wanted = |p: &Pod| p.metadata.uid() == uid && api_pod::node_name(p) == Some(agent.name.as_str());
    Ok(pods.into_iter().find(is_wanted))
}

async fn remove_directories(agent: &AgentContext, uid: &str) -> Result<(), ReconcileError> {
    let (layout, pod) = (agent.layout.clone(), uid.to_owned());
    let removed = offload(FILE_TIMEOUT, "remove the directories of a pod", move || layout.remove_pod_dirs(&pod)).await;
    removed.map_err(|source| ReconcileError::Directories { uid: uid.to_owned(), source })
}
