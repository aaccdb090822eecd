//! For tests: describes everything that a decision can read of a [`SchedulerState`].

use std::collections::BTreeMap;
use std::sync::Arc;

use cleat_api::claim::{is_reserved_for, volume_name};
use k8s_openapi::api::core::v1::PersistentVolume;

use super::SchedulerState;

impl SchedulerState {
    pub(in crate::schedule) fn claim_count(&self) -> usize {
        self.claims.len()
    }

    pub(in crate::schedule) fn volume_names(&self) -> Vec<String> {
        self.volumes.keys().cloned().collect()
    }

    /// Claims, volumes, pods and the queue, with revisions. Two states with equal summaries give equal decisions about
    /// pods of the class `fast` on the node `n1`.
    pub(in crate::schedule) fn summary(&self) -> Vec<String> {
        let version = |volume: Option<Arc<PersistentVolume>>| {
            volume.map(|v| (v.metadata.name.clone(), v.metadata.resource_version.clone()))
        };
        let mut lines = Vec::new();
        for (key, users) in self.pods_by_claim.iter().collect::<BTreeMap<_, _>>() {
            let claim = self.claim(key);
            let named = claim.as_deref().and_then(volume_name).and_then(|name| self.volume(name));
            let is_reserved = |v: &Arc<PersistentVolume>| claim.as_ref().is_some_and(|claim| is_reserved_for(v, claim));
            let reserved: Vec<_> =
                self.volumes_reserved_for(key).filter(is_reserved).map(|v| version(Some(v))).collect();
            let revision = claim.as_ref().map(|c| c.metadata.resource_version.clone());
            lines.push(format!("{key} {users:?} {revision:?} {:?} {reserved:?}", version(named)));
        }
        let free: Vec<_> = self.free_volumes("fast", Some("n1"), 0).map(|v| version(Some(v))).collect();
        let attached: BTreeMap<_, _> =
            self.attachments_by_volume.keys().map(|name| (name, version(self.volume(name)))).collect();
        let handles: BTreeMap<_, _> = self.assigned.iter().map(|(pod, a)| (pod, &a.volume_handles)).collect();
        let queue: Vec<_> = self.queue.iter().map(|(_, _, pod)| pod).collect();
        lines.push(format!("{free:?} {attached:?} {handles:?} {queue:?}"));
        lines
    }
}
