//! What the binder remembers between reconciles: the available volumes, and which of them a running reconcile has
//! reserved.
//!
//! Contract: a reservation keeps other reconciles of this process from choosing the same volume. It does not bind
//! anything: the write of `spec.claimRef` is conditional on the volume's revision, so that of two binders that choose
//! the same volume one gets a conflict and decides again. Nothing here is stored. After a restart there are no
//! reservations, and the index is filled again because [`VolumeReservations::refresh`] is called for every volume of
//! the cache.

use std::collections::HashSet;
use std::sync::Arc;

use cleat_api::claim::{claim_class, claim_ref, volume_class, volume_phase};
use cleat_runtime::Cache;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use parking_lot::Mutex;

use super::available_volumes::AvailableVolumes;

#[derive(Default)]
struct ReservationState {
    /// Available volumes that are not reserved.
    available: AvailableVolumes,
    /// Names of the volumes that a running reconcile has reserved.
    reserved: HashSet<String>,
    /// Classes in which a claim found no volume while at least one volume, of any class, was reserved.
    starved_classes: HashSet<String>,
}

#[derive(Clone)]
pub(super) struct VolumeReservations {
    volumes: Cache<PersistentVolume>,
    state: Arc<Mutex<ReservationState>>,
    on_return: Arc<dyn Fn(&PersistentVolume) + Send + Sync>,
}

/// One volume that no other reconcile of this process chooses until this value is dropped.
///
/// The release is a `Drop` so that a reconcile that fails or panics does not keep the volume.
pub(super) struct VolumeReservation {
    reservations: VolumeReservations,
    volume: Arc<PersistentVolume>,
    name: String,
}

impl VolumeReservation {
    pub(super) fn volume(&self) -> &Arc<PersistentVolume> {
        &self.volume
    }
}

impl Drop for VolumeReservation {
    fn drop(&mut self) {
        let returned = {
            let mut state = self.reservations.state.lock();
            state.reserved.remove(&self.name);
            let returned = self.reservations.refresh_locked(&mut state, &self.name);
            returned.filter(|volume| state.starved_classes.remove(volume_class(volume)))
        };
        if let Some(volume) = returned {
            (self.reservations.on_return)(&volume);
        }
    }
}

impl VolumeReservations {
    /// `on_return` is called with a volume whose reservation ended without a bind, if a claim of its class found no
    /// volume in the meantime. It runs outside the lock.
    pub(super) fn new(
        volumes: Cache<PersistentVolume>,
        on_return: impl Fn(&PersistentVolume) + Send + Sync + 'static,
    ) -> Self {
        Self { volumes, state: Arc::default(), on_return: Arc::new(on_return) }
    }

    /// Updates the index from the cache. Must be called after each change of the volume. Returns the volume if it was
    /// not in the index before and is now.
    pub(super) fn refresh(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.refresh_locked(&mut self.state.lock(), name)
    }

    /// Reads the cache under the lock, so that of two concurrent calls the later one stores the newer version.
    fn refresh_locked(&self, state: &mut ReservationState, name: &str) -> Option<Arc<PersistentVolume>> {
        let was_indexed = state.available.remove(name);
        let volume = self.volumes.named(name)?;
        let is_available = claim_ref(&volume).is_none() && volume_phase(&volume) == "Available";
        if !is_available || state.reserved.contains(name) {
            return None;
        }
        state.available.insert(volume.clone());
        (!was_indexed).then_some(volume)
    }

    /// Reserves the best available volume for the claim. Returns `None` if no available volume satisfies the claim.
    pub(super) fn reserve(&self, claim: &PersistentVolumeClaim) -> Option<VolumeReservation> {
        let mut state = self.state.lock();
        let Some(volume) = state.available.find(claim) else {
            if !state.reserved.is_empty() {
                state.starved_classes.insert(claim_class(claim).unwrap_or_default().to_owned());
            }
            return None;
        };
        let name = volume.metadata.name.clone().unwrap_or_default();
        state.available.remove(&name);
        state.reserved.insert(name.clone());
        Some(VolumeReservation { reservations: self.clone(), volume, name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bind::matching;
    use cleat_testing::build;

    fn volume(name: &str, size: &str, modes: &[&str]) -> PersistentVolume {
        let mut volume = build::volume(name, "fast", size);
        volume.spec.as_mut().unwrap().access_modes = Some(modes.iter().map(ToString::to_string).collect());
        volume
    }

    fn name(volume: &PersistentVolume) -> String {
        volume.metadata.name.clone().unwrap()
    }

    type ReturnedNames = Arc<Mutex<Vec<String>>>;

    fn reservations(volumes: Vec<PersistentVolume>) -> (Cache<PersistentVolume>, VolumeReservations, ReturnedNames) {
        let (cache, returned) = (Cache::default(), ReturnedNames::default());
        let names = returned.clone();
        let reservations = VolumeReservations::new(cache.clone(), move |v| names.lock().push(name(v)));
        for volume in volumes {
            put(&cache, &reservations, volume);
        }
        (cache, reservations, returned)
    }

    fn put(cache: &Cache<PersistentVolume>, reservations: &VolumeReservations, volume: PersistentVolume) {
        let name = name(&volume);
        cache.observe_write(volume);
        reservations.refresh(&name);
    }

    const READ_WRITE_ONCE_MODES: &[&str] = &["ReadWriteOnce"];

    #[test]
    fn the_index_finds_the_same_volume_as_a_search_of_all_volumes() {
        let all = vec![
            volume("big", "9Gi", READ_WRITE_ONCE_MODES),
            volume("b", "3Gi", READ_WRITE_ONCE_MODES),
            volume("a", "3Gi", READ_WRITE_ONCE_MODES),
            volume("small", "1Gi", READ_WRITE_ONCE_MODES),
            volume("shared", "2Gi", &["ReadWriteOnce", "ReadWriteMany"]),
            volume("read", "2Gi", &["ReadOnlyMany"]),
        ];
        let (_, reservations, _) = reservations(all.clone());
        let all: Vec<_> = all.into_iter().map(Arc::new).collect();
        for (size, mode) in [
            ("1Gi", "ReadWriteOnce"),
            ("2Gi", "ReadWriteOnce"),
            ("4Gi", "ReadWriteOnce"),
            ("2Gi", "ReadWriteMany"),
            ("2Gi", "ReadOnlyMany"),
            ("10Gi", "ReadWriteOnce"),
        ] {
            let mut claim = build::claim("ns", "c", Some("fast"), size);
            claim.spec.as_mut().unwrap().access_modes = Some(vec![mode.to_owned()]);
            let best = matching::find_best(&claim, &all, matching::CandidateFilter::Any).cloned();
            let reserved = reservations.reserve(&claim).map(|reservation| reservation.volume().clone());
            assert_eq!(reserved, best, "{size} {mode}");
        }
    }

    #[test]
    fn concurrent_claims_reserve_different_volumes() {
        let (_, reservations, returned) =
            reservations(vec![volume("a", "1Gi", READ_WRITE_ONCE_MODES), volume("b", "1Gi", READ_WRITE_ONCE_MODES)]);
        let claim = build::claim("ns", "c", Some("fast"), "1Gi");
        let first = reservations.reserve(&claim).unwrap();
        let second = reservations.reserve(&claim).unwrap();
        assert_eq!([name(first.volume()), name(second.volume())], ["a", "b"]);
        assert!(reservations.reserve(&claim).is_none());
        drop(first);
        assert_eq!(*returned.lock(), ["a"], "the starved class is reported when the volume returns");
        assert_eq!(name(reservations.reserve(&claim).unwrap().volume()), "a");
    }

    #[test]
    fn only_available_volumes_are_in_the_index() {
        let (cache, reservations, _) = reservations(vec![volume("a", "1Gi", READ_WRITE_ONCE_MODES)]);
        let claim = build::claim("ns", "c", Some("fast"), "1Gi");
        let mut changed = volume("a", "1Gi", READ_WRITE_ONCE_MODES);
        changed.metadata.resource_version = Some("2".to_owned());
        changed.spec.as_mut().unwrap().claim_ref = Some(build::reference(&claim));
        put(&cache, &reservations, changed.clone());
        assert!(reservations.reserve(&claim).is_none());
        changed.metadata.resource_version = Some("3".to_owned());
        changed.spec.as_mut().unwrap().claim_ref = None;
        put(&cache, &reservations, changed);
        assert!(reservations.reserve(&claim).is_some());
    }
}
