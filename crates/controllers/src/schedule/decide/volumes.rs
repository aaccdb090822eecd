//! The volumes of the picture: which are free and where, and which are set aside for whom. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use cleat_api::claim::{capacity, claim_ref, claim_ref_key, volume_class, volume_phase};
use cleat_api::key::Key;
use cleat_api::well_known::label;
use k8s_openapi::api::core::v1::PersistentVolume;

use super::World;
use super::why::Causes;
use super::world::{Assumable, Volume};

impl World {
    pub(super) fn reserved_for(&self, claim: &Key) -> impl Iterator<Item = Arc<PersistentVolume>> {
        self.reserved.get(claim).into_iter().flatten().filter_map(|name| self.volume(name))
    }

    /// Free volumes of a class that a host may reach, from `bytes` upwards, the smallest first.
    pub(super) fn free_volumes(
        &self,
        class: &str,
        hostname: Option<&str>,
        bytes: i64,
    ) -> impl Iterator<Item = Arc<PersistentVolume>> {
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
        let before = known.as_ref().map(|known| known.object.now());
        let was_for = before.as_ref().and_then(|before| claim_ref(before)).map(claim_ref_key);
        if let Some(before) = &before {
            self.unlist(name, before);
        }
        let is_free = object.as_ref().is_some_and(|v| claim_ref(v).is_none());
        let mut is_for = None;
        if let Some(object) = object {
            let mut next = match known {
                Some(known) => known.object.update(object),
                None => Assumable::new(object),
            };
            let now = next.now();
            if claim_ref(&now).is_some() && volume_phase(&now) == "Bound" {
                next = next.packed(&mut self.volume_sort);
            }
            let handle = now.spec.as_ref().and_then(|s| Some(s.csi.as_ref()?.volume_handle.as_str().into()));
            self.volumes.insert(name.to_owned(), Volume { object: next, handle });
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
        let before = known.object.now();
        self.unlist(name, &before);
        if let Some(known) = self.volumes.get_mut(name) {
            known.object.assumed = volume;
            let now = known.object.now();
            self.list(name, &now);
        }
    }

    fn list(&mut self, name: &str, volume: &PersistentVolume) {
        match claim_ref(volume) {
            Some(reference) => {
                let names = self.reserved.entry(claim_ref_key(reference)).or_insert_with(|| Vec::with_capacity(1));
                if let Err(place) = names.binary_search_by(|known| known.as_str().cmp(name)) {
                    names.insert(place, name.to_owned());
                }
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
                    names.retain(|known| known != name);
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

#[cfg(test)]
mod tests {
    use cleat_testing::build;

    use super::*;

    #[test]
    fn what_is_bound_is_packed_and_read_as_before() {
        let mut world = World::default();
        let mut volume = build::volume("v", "class", "1Gi");
        volume.spec.get_or_insert_default().claim_ref = Some(k8s_openapi::api::core::v1::ObjectReference {
            namespace: Some("ns".to_owned()),
            name: Some("c".to_owned()),
            ..Default::default()
        });
        volume.status.get_or_insert_default().phase = Some("Bound".to_owned());
        let volume = Arc::new(volume);
        let key = Key::namespaced("ns", "c");
        world.set_volume("v", Some(volume.clone()));
        assert!(!Arc::ptr_eq(&world.volume("v").unwrap(), &volume), "it was packed");
        assert_eq!(world.volume("v"), Some(volume.clone()));
        assert_eq!(world.reserved_for(&key).collect::<Vec<_>>(), std::slice::from_ref(&volume));
        assert_eq!(
            world.volumes["v"].handle.as_deref(),
            volume.spec.as_ref().and_then(|s| Some(&*s.csi.as_ref()?.volume_handle))
        );
        let mut freed = (*volume).clone();
        freed.spec.get_or_insert_default().claim_ref = None;
        freed.status.get_or_insert_default().phase = Some("Available".to_owned());
        let freed = Arc::new(freed);
        world.set_volume("v", Some(freed.clone()));
        assert!(Arc::ptr_eq(&world.volume("v").unwrap(), &freed), "a free one may be taken at any moment");
        assert_eq!(world.reserved_for(&key).count(), 0);
        world.set_volume("v", None);
        assert_eq!((world.volume("v"), world.reserved.len()), (None, 0));
    }
}
