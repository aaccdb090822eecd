//! The volumes of the [`SchedulerState`]: which are free and for which hosts, and which are reserved for which claim.
//! Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use cleat_api::claim::{capacity, claim_ref, claim_ref_key, volume_class, volume_phase};
use cleat_api::key::Key;
use cleat_api::well_known::label;
use k8s_openapi::api::core::v1::PersistentVolume;

use super::SchedulerState;
use super::state::{Assumable, VolumeEntry};
use super::unschedulable::ClusterEvents;

impl SchedulerState {
    /// The volumes whose claimRef names this claim, with or without its uid.
    pub(super) fn volumes_reserved_for(&self, claim: &Key) -> impl Iterator<Item = Arc<PersistentVolume>> {
        self.volumes_by_claim.get(claim).into_iter().flatten().filter_map(|name| self.volume(name))
    }

    /// Free volumes of a class with at least `min_bytes`, the smallest first. Contains all volumes that the host
    /// reaches, and volumes without hostname affinity that it may not reach.
    pub(super) fn free_volumes(
        &self,
        class: &str,
        hostname: Option<&str>,
        min_bytes: i64,
    ) -> impl Iterator<Item = Arc<PersistentVolume>> {
        let by_host = self.free_by_class.get(class);
        let of_any_host = by_host.and_then(|by_host| by_host.get(&None));
        let of_host = hostname.and_then(|name| by_host?.get(&Some(name.to_owned())));
        let sets = of_any_host.into_iter().chain(of_host);
        let mut volumes: Vec<_> = sets.flat_map(|set| set.range((min_bytes, String::new())..)).collect();
        volumes.sort();
        volumes.into_iter().filter_map(|(_, name)| self.volume(name))
    }

    pub fn set_volume(&mut self, name: &str, object: Option<Arc<PersistentVolume>>) {
        let old = self.volumes.remove(name);
        let before = old.as_ref().map(|old| old.object.current());
        let old_claim = before.as_ref().and_then(|before| claim_ref(before)).map(claim_ref_key);
        if let Some(before) = &before {
            self.unindex_volume(name, before);
        }
        let is_free = object.as_ref().is_some_and(|v| claim_ref(v).is_none());
        let mut new_claim = None;
        if let Some(object) = object {
            let mut next = match old {
                Some(old) => old.object.update(object),
                None => Assumable::new(object),
            };
            let volume = next.current();
            if claim_ref(&volume).is_some() && volume_phase(&volume) == "Bound" {
                next = next.packed(&mut self.volume_compressor);
            }
            let handle = volume.spec.as_ref().and_then(|s| Some(s.csi.as_ref()?.volume_handle.as_str().into()));
            self.volumes.insert(name.to_owned(), VolumeEntry { object: next, handle });
            self.index_volume(name, &volume);
            new_claim = claim_ref(&volume).map(claim_ref_key);
        }
        let new_claim = new_claim.filter(|claim| Some(claim) != old_claim.as_ref());
        for claim in old_claim.iter().chain(&new_claim) {
            self.on_claim_change(claim);
        }
        if is_free {
            self.wake_pods(ClusterEvents::STORAGE);
        }
    }

    /// Sets the volume's assumed version; `None` reverts to the original.
    pub(super) fn assume_volume(&mut self, name: &str, volume: Option<Arc<PersistentVolume>>) {
        let Some(entry) = self.volumes.get(name) else { return };
        let before = entry.object.current();
        self.unindex_volume(name, &before);
        if let Some(entry) = self.volumes.get_mut(name) {
            entry.object.assumed = volume;
            let now = entry.object.current();
            self.index_volume(name, &now);
        }
    }

    fn index_volume(&mut self, name: &str, volume: &PersistentVolume) {
        match claim_ref(volume) {
            Some(reference) => {
                let names =
                    self.volumes_by_claim.entry(claim_ref_key(reference)).or_insert_with(|| Vec::with_capacity(1));
                if let Err(position) = names.binary_search_by(|other| other.as_str().cmp(name)) {
                    names.insert(position, name.to_owned());
                }
            }
            None => {
                let by_host = self.free_by_class.entry(volume_class(volume).to_owned()).or_default();
                for hostname in hostnames(volume) {
                    by_host.entry(hostname).or_default().insert(size_and_name(name, volume));
                }
            }
        }
    }

    fn unindex_volume(&mut self, name: &str, volume: &PersistentVolume) {
        match claim_ref(volume) {
            Some(reference) => {
                let claim = claim_ref_key(reference);
                if let Some(names) = self.volumes_by_claim.get_mut(&claim) {
                    names.retain(|other| other != name);
                    if names.is_empty() {
                        self.volumes_by_claim.remove(&claim);
                    }
                }
            }
            None => {
                let Some(by_host) = self.free_by_class.get_mut(volume_class(volume)) else { return };
                for hostname in hostnames(volume) {
                    if let Some(volumes) = by_host.get_mut(&hostname) {
                        volumes.remove(&size_and_name(name, volume));
                    }
                }
            }
        }
    }
}

fn size_and_name(name: &str, volume: &PersistentVolume) -> (i64, String) {
    (capacity(volume).map_or(0, |q| q.to_bytes()), name.to_owned())
}

/// The hostnames in the volume's node affinity, if every term has some; else only `None`, which stands for any host.
fn hostnames(volume: &PersistentVolume) -> BTreeSet<Option<String>> {
    let required = volume.spec.as_ref().and_then(|s| s.node_affinity.as_ref()?.required.as_ref());
    let mut hostnames = BTreeSet::new();
    for term in required.iter().flat_map(|r| &r.node_selector_terms) {
        let mut expressions = term.match_expressions.iter().flatten();
        match expressions.find(|e| e.key == label::HOSTNAME && e.operator == "In") {
            Some(expression) => hostnames.extend(expression.values.iter().flatten().cloned().map(Some)),
            None => return BTreeSet::from([None]),
        }
    }
    if hostnames.is_empty() { BTreeSet::from([None]) } else { hostnames }
}

#[cfg(test)]
mod tests {
    use cleat_testing::build;

    use super::*;

    #[test]
    fn bound_volumes_are_packed_and_read_unchanged() {
        let mut state = SchedulerState::default();
        let mut volume = build::volume("v", "class", "1Gi");
        volume.spec.get_or_insert_default().claim_ref = Some(k8s_openapi::api::core::v1::ObjectReference {
            namespace: Some("ns".to_owned()),
            name: Some("c".to_owned()),
            ..Default::default()
        });
        volume.status.get_or_insert_default().phase = Some("Bound".to_owned());
        let volume = Arc::new(volume);
        let key = Key::namespaced("ns", "c");
        state.set_volume("v", Some(volume.clone()));
        assert!(!Arc::ptr_eq(&state.volume("v").unwrap(), &volume), "it was packed");
        assert_eq!(state.volume("v"), Some(volume.clone()));
        assert_eq!(state.volumes_reserved_for(&key).collect::<Vec<_>>(), std::slice::from_ref(&volume));
        assert_eq!(
            state.volumes["v"].handle.as_deref(),
            volume.spec.as_ref().and_then(|s| Some(&*s.csi.as_ref()?.volume_handle))
        );
        let mut freed = (*volume).clone();
        freed.spec.get_or_insert_default().claim_ref = None;
        freed.status.get_or_insert_default().phase = Some("Available".to_owned());
        let freed = Arc::new(freed);
        state.set_volume("v", Some(freed.clone()));
        assert!(
            Arc::ptr_eq(&state.volume("v").unwrap(), &freed),
            "a free volume is not packed: any decision may read it"
        );
        assert_eq!(state.volumes_reserved_for(&key).count(), 0);
        state.set_volume("v", None);
        assert_eq!((state.volume("v"), state.volumes_by_claim.len()), (None, 0));
    }
}
