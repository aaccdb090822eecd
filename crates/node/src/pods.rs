//! One visit to one pod: take in what it wants, tell it how its volumes stand, and when it has ended and nothing of it is mounted
//! any more, let its object go.

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
use kube::Api;
use kube::api::{DeleteParams, ListParams, Preconditions};
use tracing::{debug, info};

use crate::agent::{FILES, Shared, TurnError};
use crate::desired::{self, Objects, Stage};
use crate::layout::PodUid;
use crate::report::{Verdict, verdict};

pub(crate) async fn turn(agent: Arc<Shared>, uid: PodUid) -> Result<Outcome, TurnError> {
    match observe(&agent, &uid) {
        Some((pod, Stage::Running | Stage::Stopping)) => report(&agent, &pod).await?,
        Some((pod, Stage::Ended)) => finish(&agent, &pod).await?,
        None => missing(&agent, &uid).await?,
    }
    Ok(Outcome::Done)
}

/// Takes in what the cache says of the pod; `None` if it is not there.
pub(crate) fn observe(agent: &Shared, uid: &str) -> Option<(Arc<Pod>, Stage)> {
    let key = agent.state.lock().names.get(uid).cloned()?;
    let pod = agent.pods.get(&key).filter(|p| p.metadata.uid() == uid)?;
    let wants = desired::wants(&pod, &Watched { agent, uid });
    let stage = wants.stage;
    for volume in &wants.volumes {
        if let Err(blocked) = &volume.want
            && !blocked.passing()
            && stage == Stage::Running
        {
            let message = format!("Unable to attach or mount volumes: unmounted volumes=[{}]: {blocked}", volume.name);
            agent.recorder.warning(&*pod, "FailedMount", message);
        }
    }
    let touched = agent.state.lock().set_pod(wants, &agent.name);
    if !touched.is_empty() {
        agent.wake_node();
    }
    for id in touched {
        agent.wake_volume(id);
    }
    Some((pod, stage))
}

/// Reads objects from the caches, and remembers for whom: a change between the reading and the remembering would be lost, so
/// the remembering comes first.
struct Watched<'a> {
    agent: &'a Shared,
    uid: &'a str,
}

impl Objects for Watched<'_> {
    fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>> {
        self.agent.state.lock().by_claim.add(key.clone(), self.uid);
        self.agent.claims.get(key)
    }

    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.agent.state.lock().by_volume.add(name.to_owned(), self.uid);
        self.agent.volumes.named(name)
    }

    fn driver(&self, name: &str) -> Option<Arc<CSIDriver>> {
        self.agent.csi_drivers.named(name)
    }
}

/// Writes the pod's condition if it says something else than it should.
async fn report(agent: &Shared, pod: &Pod) -> Result<(), TurnError> {
    let standings = agent.state.lock().standings(pod.metadata.uid());
    let (status, reason, message) = match verdict(&standings) {
        Verdict::Unchanged => return Ok(()),
        Verdict::Mounted => ("True", "VolumesMounted", None),
        Verdict::NotMounted { reason, message } => ("False", reason, Some(message)),
    };
    let current = pod_condition(pod, VOLUMES_MOUNTED_CONDITION);
    let next =
        next_pod_condition(current, VOLUMES_MOUNTED_CONDITION, status, Some(reason), message.as_deref(), agent.clock.time());
    let Some(next) = next else { return Ok(()) };
    let conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let mut conditions: Vec<_> = conditions.filter(|c| c.type_ != VOLUMES_MOUNTED_CONDITION).cloned().collect();
    conditions.push(next);
    // The list is sent whole, so only upon the version it was read from.
    let patch = serde_json::json!({
        "metadata": { "resourceVersion": pod.metadata.resource_version },
        "status": { "conditions": conditions },
    });
    let key = Key::of(&pod.metadata);
    match write::merge::<Pod>(&agent.client, Part::Status, &key, &patch).await {
        Ok(written) => agent.pods.observe_write(written),
        // It went meanwhile; its deletion is on the way to the cache.
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

/// The pod has ended. Its object is let go when it is to be deleted and nothing of it is mounted any more.
async fn finish(agent: &Shared, pod: &Pod) -> Result<(), TurnError> {
    let uid = pod.metadata.uid();
    if agent.state.lock().has_volumes(uid) {
        return Ok(());
    }
    remove_directories(agent, uid).await?;
    if !pod.metadata.is_deleting() || pod.metadata.finalizers.as_ref().is_some_and(|f| !f.is_empty()) {
        return Ok(());
    }
    let key = Key::of(&pod.metadata);
    let api: Api<Pod> = Api::namespaced(agent.client.clone(), key.namespace.as_deref().unwrap_or_default());
    let params = DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
        ..DeleteParams::default()
    };
    match api.delete(&key.name, &params).await {
        Ok(_) => {
            info!(pod = %key, "pod ended and its volumes unmounted");
            Ok(())
        }
        // Gone, or another pod of the same name.
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        Err(error) => Err(TurnError::Api { what: "delete pod", key, source: Box::new(error) }),
    }
}

/// The pod is not in the cache. That alone proves nothing: the server is asked before its volumes are taken away.
async fn missing(agent: &Shared, uid: &str) -> Result<(), TurnError> {
    let (key, settled) = {
        let state = agent.state.lock();
        (state.names.get(uid).cloned(), state.is_confirmed_gone(uid) || !state.has_volumes(uid))
    };
    let there = match &key {
        // Nothing to take away, or asked before.
        _ if settled => None,
        Some(key) => {
            let found: Option<Pod> = get_live(&agent.client, key).await?;
            found.filter(|p| p.metadata.uid() == uid)
        }
        None => find(agent, uid).await?,
    };
    if let Some(pod) = there {
        let key = Key::of(&pod.metadata);
        agent.state.lock().names.insert(uid.to_owned(), key.clone());
        return Err(TurnError::CacheBehind(key));
    }
    let touched = agent.state.lock().pod_is_gone(uid);
    if touched.is_empty() || !agent.state.lock().has_volumes(uid) {
        remove_directories(agent, uid).await?;
    }
    for id in touched {
        agent.wake_volume(id);
    }
    agent.wake_node();
    Ok(())
}

/// Looks for a pod of which only the uid is known, from its directory on disk.
async fn find(agent: &Shared, uid: &str) -> Result<Option<Pod>, TurnError> {
    let api: Api<Pod> = Api::all(agent.client.clone());
    let on_this_node = ListParams::default().fields(&format!("spec.nodeName={}", agent.name));
    let list = match api.list(&on_this_node).await {
        // A server without this selector: look through all pods.
        Err(kube::Error::Api(status)) if status.code == 400 => api.list(&ListParams::default()).await,
        list => list,
    };
    let list = list.map_err(|source| TurnError::Api {
        what: "list pods",
        key: Key::cluster(agent.name.clone()),
        source: Box::new(source),
    })?;
    let here = |p: &Pod| p.metadata.uid() == uid && api_pod::node_name(p) == Some(agent.name.as_str());
    Ok(list.items.into_iter().find(here))
}

async fn remove_directories(agent: &Shared, uid: &str) -> Result<(), TurnError> {
    let (layout, pod) = (agent.layout.clone(), uid.to_owned());
    let removed = offload(FILES, "remove the directories of a pod", move || layout.remove_pod(&pod)).await;
    removed.map_err(|source| TurnError::Directories { uid: uid.to_owned(), source })
}
