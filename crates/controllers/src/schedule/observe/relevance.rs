//! Selects the claims and volumes that the [`SchedulerState`] must contain, and gives them to it.
//!
//! Most claims are bound and used by no pending or assigned pod. Neither they nor their volumes can affect a decision,
//! and with many of them they would take most of the state's memory. They are read from the cache when a pod appears
//! that uses them.
//!
//! The state contains
//! - the claims that a pending or assigned pod uses,
//! - all volumes, except those that are bound for good to a claim that is not in the state, and have no
//!   VolumeAttachment.

use std::sync::Arc;

use cleat_api::claim::{claim_ref, claim_ref_key, volume_name};
use cleat_api::key::{Key, Meta as _};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;

use crate::schedule::decide::{SchedulerState, is_bound};

/// Reads objects as they are now.
pub(super) trait CacheLookup {
    fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>>;
    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>>;
}

/// Updates a state with changed objects, and with the claims and volumes that become relevant or irrelevant by that.
pub(super) struct StateUpdate<'a, L> {
    pub(super) state: &'a mut SchedulerState,
    pub(super) lookup: &'a L,
}

impl<L: CacheLookup> StateUpdate<'_, L> {
    pub(super) fn apply_pod(&mut self, key: &Key, pod: Option<Arc<Pod>>) {
        let mut claims = self.state.claims_of_pod(key);
        self.state.set_pod(key, pod);
        claims.extend(self.state.claims_of_pod(key));
        for claim in claims {
            if self.state.is_claim_used(&claim) != self.state.has_claim(&claim) {
                self.apply_claim(&claim);
            }
        }
    }

    pub(super) fn apply_claim(&mut self, key: &Key) {
        let cached = self.lookup.claim(key);
        let claim = cached.clone().filter(|_| self.state.is_claim_used(key));
        if claim.is_none() && !self.state.has_claim(key) {
            // If the volume arrived before its claim was bound, it is in the state and may leave it now.
            if let Some(name) = cached.as_deref().and_then(volume_name) {
                self.update_volume_relevance(name);
            }
            return;
        }
        let volume_before = self.state.volume_of_claim(key);
        // The volume is set first: `set_claim` counts the volumes of the claim's pods.
        if let Some(name) = claim.as_deref().and_then(volume_name).filter(|name| !self.state.has_volume(name)) {
            self.state.set_volume(name, self.lookup.volume(name));
        }
        self.state.set_claim(key, claim);
        if let Some(name) = volume_before {
            self.update_volume_relevance(&name);
        }
    }

    pub(super) fn apply_volume(&mut self, name: &str) {
        let volume = self.lookup.volume(name).filter(|volume| self.is_relevant(name, volume));
        if volume.is_some() || self.state.has_volume(name) {
            self.state.set_volume(name, volume);
        }
    }

    pub(super) fn apply_attachment(&mut self, name: &str, attachment: Option<&VolumeAttachment>) {
        let volume_before = self.state.volume_of_attachment(name);
        self.state.set_attachment(name, attachment);
        for volume in volume_before.into_iter().chain(self.state.volume_of_attachment(name)) {
            self.update_volume_relevance(&volume);
        }
    }

    /// Adds or removes the volume if its relevance has changed. A volume that stays is not updated: its own change does
    /// that.
    fn update_volume_relevance(&mut self, name: &str) {
        let is_relevant = self.lookup.volume(name).is_some_and(|volume| self.is_relevant(name, &volume));
        if is_relevant != self.state.has_volume(name) {
            self.apply_volume(name);
        }
    }

    /// A volume whose claim is bound to it for good is irrelevant while the claim is not in the state and the volume is
    /// not attached. [`StateUpdate::apply_claim`] adds it together with the claim.
    fn is_relevant(&self, name: &str, volume: &PersistentVolume) -> bool {
        let Some(reference) = claim_ref(volume) else { return true };
        let key = claim_ref_key(reference);
        let is_owner = |claim: &PersistentVolumeClaim| {
            Some(claim.metadata.uid()) == reference.uid.as_deref() && volume_name(claim) == Some(name)
        };
        self.state.is_claim_used(&key)
            || self.state.is_volume_named(name)
            || !self.lookup.claim(&key).is_some_and(|claim| is_owner(&claim) && is_bound(&claim))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use cleat_testing::build;

    use super::*;

    #[derive(Default)]
    struct TestCaches {
        claims: HashMap<Key, Arc<PersistentVolumeClaim>>,
        volumes: HashMap<String, Arc<PersistentVolume>>,
    }

    impl CacheLookup for TestCaches {
        fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>> {
            self.claims.get(key).cloned()
        }

        fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
            self.volumes.get(name).cloned()
        }
    }

    /// Caches, a state with the relevant objects only, and a state with all objects.
    #[derive(Default)]
    struct Model {
        caches: TestCaches,
        pods: HashMap<Key, Arc<Pod>>,
        relevant: SchedulerState,
        complete: SchedulerState,
        revision: u64,
    }

    impl Model {
        fn update(&mut self) -> StateUpdate<'_, TestCaches> {
            StateUpdate { state: &mut self.relevant, lookup: &self.caches }
        }

        fn next_revision(&mut self) -> Option<String> {
            self.revision += 1;
            Some(self.revision.to_string())
        }

        fn claim(&mut self, name: &str, claim: Option<PersistentVolumeClaim>) {
            let key = Key::namespaced("ns", name);
            self.caches.claims.remove(&key);
            if let Some(mut claim) = claim {
                claim.metadata.resource_version = self.next_revision();
                self.caches.claims.insert(key.clone(), Arc::new(claim));
            }
            self.update().apply_claim(&key);
            self.complete.set_claim(&key, self.caches.claim(&key));
        }

        fn volume(&mut self, name: &str, volume: Option<PersistentVolume>) {
            self.caches.volumes.remove(name);
            if let Some(mut volume) = volume {
                volume.metadata.resource_version = self.next_revision();
                self.caches.volumes.insert(name.to_owned(), Arc::new(volume));
            }
            self.update().apply_volume(name);
            self.complete.set_volume(name, self.caches.volume(name));
        }

        fn pod(&mut self, name: &str, pod: Option<Pod>) {
            let key = Key::namespaced("ns", name);
            self.pods.remove(&key);
            self.pods.extend(pod.map(|pod| (key.clone(), Arc::new(pod))));
            let object = self.pods.get(&key).cloned();
            self.update().apply_pod(&key, object.clone());
            self.complete.set_pod(&key, object);
        }

        fn attachment(&mut self, volume: &str, exists: bool) {
            let attachment = build::attachment(&build::volume(volume, "fast", "1Gi"), "n1");
            let name = attachment.metadata.name.clone().unwrap();
            self.update().apply_attachment(&name, exists.then_some(&attachment));
            self.complete.set_attachment(&name, exists.then_some(&attachment));
        }
    }

    #[test]
    fn a_bound_pair_is_in_the_state_while_a_pod_uses_it() {
        let mut model = Model::default();
        let (claim, volume) =
            build::bound(build::claim("ns", "c1", Some("fast"), "1Gi"), build::volume("v1", "fast", "1Gi"));
        let counts = |model: &Model| (model.relevant.claim_count(), model.relevant.volume_names().len());
        model.volume("v1", Some(build::volume("v1", "fast", "1Gi")));
        assert_eq!(counts(&model), (0, 1), "a free volume");
        model.claim("c1", Some(claim));
        model.volume("v1", Some(volume.clone()));
        assert_eq!(counts(&model), (0, 0), "no pod uses them");
        let (late, early) =
            build::bound(build::claim("ns", "c2", Some("fast"), "1Gi"), build::volume("v2", "fast", "1Gi"));
        model.volume("v2", Some(early));
        assert_eq!(counts(&model), (0, 1), "the claim of the volume does not exist yet");
        model.claim("c2", Some(late));
        assert_eq!(counts(&model), (0, 0), "the claim exists, and no pod uses it");
        model.pod("p", Some(build::pod("ns", "p", "", &["c1"])));
        assert_eq!(counts(&model), (1, 1), "a pod is pending");
        model.pod("p", Some(build::pod("ns", "p", "n1", &["c1"])));
        assert_eq!(counts(&model), (1, 1), "a pod has its node");
        model.attachment("v1", true);
        model.pod("p", None);
        assert_eq!(counts(&model), (0, 1), "still attached");
        model.attachment("v1", false);
        assert_eq!(counts(&model), (0, 0), "detached");
        model.claim("c1", None);
        model.volume("v1", Some(volume));
        assert_eq!(counts(&model), (0, 1), "a volume whose claim is gone");
    }

    #[test]
    fn a_state_with_relevant_objects_equals_one_with_all_objects() {
        let mut model = Model::default();
        let mut seed = 1_u64;
        let mut random = move |below: usize| {
            // xorshift: the same sequence in every run.
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            usize::try_from(seed % below as u64).unwrap()
        };
        for step in 0..3000 {
            let number = random(4);
            let (claim, volume) = (format!("c{number}"), format!("v{number}"));
            let existing = model.caches.claims.get(&Key::namespaced("ns", &claim)).map(|claim| claim.as_ref().clone());
            let fresh = || {
                let mut fresh = build::claim("ns", &claim, Some("fast"), "1Gi");
                fresh.metadata.uid = Some(format!("{claim}-{step}"));
                fresh
            };
            let is_unbound = existing.as_ref().is_none_or(|claim| volume_name(claim).is_none());
            // Only changes that the API server allows: a claim's `spec.volumeName` never changes once it is set.
            match random(12) {
                0 => model.claim(&claim, None),
                1 if existing.is_none() => model.claim(&claim, Some(fresh())),
                1 => {
                    let mut incomplete = existing.unwrap_or_else(fresh);
                    incomplete.metadata.annotations = None;
                    model.claim(&claim, Some(incomplete));
                }
                2 | 3 if is_unbound => {
                    let unbound = existing.unwrap_or_else(fresh);
                    model.claim(&claim, Some(build::bound(unbound, build::volume(&volume, "fast", "1Gi")).0));
                }
                4 if is_unbound => {
                    // The claim names a volume that may be bound to another claim.
                    let other = build::volume(&format!("v{}", random(4)), "fast", "1Gi");
                    model.claim(&claim, Some(build::bound(existing.unwrap_or_else(fresh), other).0));
                }
                2..=4 => model.claim(&claim, existing),
                5 => model.volume(&volume, None),
                6 => model.volume(&volume, Some(build::volume(&volume, "fast", "1Gi"))),
                7 | 8 => {
                    let free = build::volume(&volume, "fast", "1Gi");
                    model.volume(&volume, Some(build::bound(existing.unwrap_or_else(fresh), free).1));
                }
                9 => model.attachment(&volume, random(2) == 0),
                10 => model.pod(&format!("p{}", random(3)), None),
                _ => {
                    // A pod's claims never change; only its node does.
                    let name = format!("p{}", random(3));
                    let existing = model.pods.get(&Key::namespaced("ns", &name)).map(|pod| pod.as_ref().clone());
                    let fresh = || {
                        let claims = [claim.as_str(), &format!("c{}", random(4))];
                        let mut pod = build::pod("ns", &name, ["", "n1"][random(2)], &claims);
                        pod.metadata.uid = Some(format!("{name}-{step}"));
                        pod
                    };
                    let mut pod = existing.unwrap_or_else(fresh);
                    if step % 2 == 0 {
                        pod.spec.as_mut().unwrap().node_name = Some("n1".to_owned());
                    }
                    model.pod(&name, Some(pod));
                }
            }
            assert_eq!(model.relevant.summary(), model.complete.summary(), "step {step}");
            let volumes = model.caches.volumes.clone();
            let in_state = model.relevant.volume_names();
            let update = model.update();
            assert!(in_state.iter().all(|name| update.is_relevant(name, &volumes[name])), "step {step}: {in_state:?}");
        }
    }
}
