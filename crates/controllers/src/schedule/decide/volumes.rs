//! The volumes of the picture: which are free and where, and which are set aside for whom. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use cleat_api::claim::{capacity, claim_ref, claim_ref_key, volume_class};
use cleat_api::key::Key;
use cleat_api::keys::label;
use k8s_openapi::api::core::v1::PersistentVolume;

use super::World;
use super::why::Causes;
use super::world::Assumable;

impl World {
    pub(super) fn reserved_for(&self, claim: &Key) -> impl Iterator<Item = &Arc<PersistentVolume>> {
        self.reserved.get(claim).into_iter().flatten().filter_map(|name| self.volume(name))
    }

    /// Free volumes of a class that a host may reach, from `bytes` upwards, the smallest first.
    pub(super) fn free_volumes(
        &self,
        class: &str,
        hostname: Option<&str>,
        bytes: i64,
    ) -> impl Iterator<Item = &Arc<PersistentVolume>> {
        let places = self.free.get(class);
        let anywhere = places.and_then(|p| p.get(&None));
        let here = hostname.and_then(|name| places?.get(&Some(name.to_owned())));
        let listed = anywhere.into_iter().chain(here);
        let mut all: Vec<_> = listed.flat_map(|set| set.range((bytes, String::new())..)).collect();
        all.sort();
        all.into_iter().filter_map(|(_, name)| self.volume(name))
    }

    pub fn set_volume(&mut self, name: &str, object: Option<Arc<PersistentVolume>>) {
        let known = self.volumes.remove(name);
        let was_for = known.as_ref().and_then(|known| claim_ref(known.now())).map(claim_ref_key);
        if let Some(known) = &known {
            self.unlist(name, &known.now().clone());
        }
        let is_free = object.as_ref().is_some_and(|v| claim_ref(v).is_none());
        let mut is_for = None;
        if let Some(object) = object {
            let next = match known {
                Some(known) => known.update(object),
                None => Assumable::new(object),
            };
            let now = next.now().clone();
            self.volumes.insert(name.to_owned(), next);
            self.list(name, &now);
            is_for = claim_ref(&now).map(claim_ref_key);
        }
        for claim in was_for.iter().chain(is_for.iter().filter(|claim| Some(*claim) != was_for.as_ref())) {
            self.claim_changed(claim);
        }
        if is_free {
            self.wake(Causes::VOLUMES);
        }
    }

    pub(super) fn assume_volume(&mut self, name: &str, volume: Option<Arc<PersistentVolume>>) {
        let Some(known) = self.volumes.get(name) else { return };
        let before = known.now().clone();
        self.unlist(name, &before);
        if let Some(known) = self.volumes.get_mut(name) {
            known.assumed = volume;
            let now = known.now().clone();
            self.list(name, &now);
        }
    }

    fn list(&mut self, name: &str, volume: &PersistentVolume) {
        match claim_ref(volume) {
            Some(reference) => {
                self.reserved.entry(claim_ref_key(reference)).or_default().insert(name.to_owned());
            }
            None => {
                let places = self.free.entry(volume_class(volume).to_owned()).or_default();
                for place in hosts_of(volume) {
                    places.entry(place).or_default().insert(entry(name, volume));
                }
            }
        }
    }

    fn unlist(&mut self, name: &str, volume: &PersistentVolume) {
        match claim_ref(volume) {
            Some(reference) => {
                let claim = claim_ref_key(reference);
                if let Some(names) = self.reserved.get_mut(&claim) {
                    names.remove(name);
                    if names.is_empty() {
                        self.reserved.remove(&claim);
                    }
                }
            }
            None => {
                let Some(places) = self.free.get_mut(volume_class(volume)) else { return };
                for place in hosts_of(volume) {
                    if let Some(names) = places.get_mut(&place) {
                        names.remove(&entry(name, volume));
                    }
                }
            }
        }
    }
}

fn entry(name: &str, volume: &PersistentVolume) -> (i64, String) {
    (capacity(volume).map_or(0, |q| q.to_bytes()), name.to_owned())
}

/// The hosts that a volume's affinity names, if every term of it names some; else it may be anywhere.
fn hosts_of(volume: &PersistentVolume) -> BTreeSet<Option<String>> {
    let required = volume.spec.as_ref().and_then(|s| s.node_affinity.as_ref()?.required.as_ref());
    let mut hosts = BTreeSet::new();
    for term in required.iter().flat_map(|r| &r.node_selector_terms) {
        let mut expressions = term.match_expressions.iter().flatten();
        match expressions.find(|e| e.key == label::HOSTNAME && e.operator == "In") {
            Some(named) => hosts.extend(named.values.iter().flatten().cloned().map(Some)),
            None => return BTreeSet::from([None]),
        }
    }
    if hosts.is_empty() { BTreeSet::from([None]) } else { hosts }
}
