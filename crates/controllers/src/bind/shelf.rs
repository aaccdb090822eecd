//! The free volumes, in the order in which claims take them: by class, then fewest access modes, then size, then name.
//!
//! A volume that a claim is about to take is off the shelf until that came to its end, so that claims working at the same
//! time take different ones. The server still decides: two binders may take the same volume, and one of them loses.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use cleat_api::claim::{capacity, claim_class, claim_ref, requested_storage, volume_class, volume_phase};
use cleat_api::quantity::Quantity;
use cleat_runtime::Cache;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use parking_lot::Mutex;

use super::matching;

/// Access modes, size, name.
type Place = (Vec<String>, Option<Quantity>, String);

#[derive(Default)]
struct Places {
    by_class: HashMap<String, BTreeMap<usize, BTreeMap<Place, Arc<PersistentVolume>>>>,
    /// Where each volume on the shelf is.
    of: HashMap<String, (String, usize, Place)>,
    /// Volumes that claims are about to take.
    lent: HashSet<String>,
    /// Classes in which a claim found nothing while a volume was lent.
    missed: HashSet<String>,
}

#[derive(Clone)]
pub(super) struct Shelf {
    volumes: Cache<PersistentVolume>,
    places: Arc<Mutex<Places>>,
}

/// A volume that nobody else in this process takes meanwhile. Dropped, it is looked at anew.
pub(super) struct Taken {
    shelf: Shelf,
    name: String,
    returned: Box<dyn Fn(&PersistentVolume) + Send + Sync>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let back = {
            let mut places = self.shelf.places.lock();
            places.lent.remove(&self.name);
            let back = self.shelf.refresh_in(&mut places, &self.name);
            back.filter(|volume| places.missed.remove(volume_class(volume)))
        };
        if let Some(volume) = back {
            (self.returned)(&volume);
        }
    }
}

impl Shelf {
    pub(super) fn new(volumes: Cache<PersistentVolume>) -> Self {
        Self { volumes, places: Arc::default() }
    }

    /// Something about the volume may have changed. Returns it if it has come onto the shelf by that.
    pub(super) fn refresh(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.refresh_in(&mut self.places.lock(), name)
    }

    /// The cache is read under the lock: whoever comes last sees the newest state.
    fn refresh_in(&self, places: &mut Places, name: &str) -> Option<Arc<PersistentVolume>> {
        let was_there = places.remove(name);
        let volume = self.volumes.named(name)?;
        let free = claim_ref(&volume).is_none() && volume_phase(&volume) == "Available";
        if !free || places.lent.contains(name) {
            return None;
        }
        places.insert(volume.clone());
        (!was_there).then_some(volume)
    }

    /// The best free volume for the claim, if there is one. `returned` hears of it if it is not used after all, and
    /// somebody else could have used it.
    pub(super) fn take(
        &self,
        claim: &PersistentVolumeClaim,
        returned: impl Fn(&PersistentVolume) + Send + Sync + 'static,
    ) -> Option<(Arc<PersistentVolume>, Taken)> {
        let mut places = self.places.lock();
        let Some(volume) = places.find(claim) else {
            if !places.lent.is_empty() {
                places.missed.insert(claim_class(claim).unwrap_or_default().to_owned());
            }
            return None;
        };
        let name = volume.metadata.name.clone().unwrap_or_default();
        places.remove(&name);
        places.lent.insert(name.clone());
        Some((volume, Taken { shelf: self.clone(), name, returned: Box::new(returned) }))
    }
}

impl Places {
    fn find(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolume>> {
        let wanted = requested_storage(claim);
        let class = self.by_class.get(claim_class(claim).unwrap_or_default())?;
        // Fewest modes first; among those with as many, each set of modes has its own order by size.
        class.values().find_map(|places| {
            let mut best: Option<(&Place, &Arc<PersistentVolume>)> = None;
            let mut from = (Vec::new(), None, String::new());
            while let Some(((modes, _, _), _)) = places.range(from.clone()..).next() {
                let modes = modes.clone();
                let fit = places
                    .range((modes.clone(), wanted, String::new())..)
                    .take_while(|((m, _, _), _)| *m == modes)
                    .find(|(_, volume)| matching::suits(volume, claim));
                if let Some((place, volume)) = fit
                    && best.is_none_or(|((_, size, name), _)| (&place.1, &place.2) < (size, name))
                {
                    best = Some((place, volume));
                }
                from = (after(modes), None, String::new());
            }
            best.map(|(_, volume)| volume.clone())
        })
    }

    fn insert(&mut self, volume: Arc<PersistentVolume>) {
        let name = volume.metadata.name.clone().unwrap_or_default();
        let modes: Vec<String> = cleat_api::matching::access_modes(&volume).into_iter().map(ToOwned::to_owned).collect();
        let (class, count) = (volume_class(&volume).to_owned(), modes.len());
        let place = (modes, capacity(&volume), name.clone());
        let shelf = self.by_class.entry(class.clone()).or_default().entry(count).or_default();
        shelf.insert(place.clone(), volume);
        self.of.insert(name, (class, count, place));
    }

    fn remove(&mut self, name: &str) -> bool {
        let Some((class, count, place)) = self.of.remove(name) else { return false };
        if let Some(shelves) = self.by_class.get_mut(&class) {
            if let Some(shelf) = shelves.get_mut(&count) {
                shelf.remove(&place);
                if shelf.is_empty() {
                    shelves.remove(&count);
                }
            }
            if shelves.is_empty() {
                self.by_class.remove(&class);
            }
        }
        true
    }
}

/// The least list of modes that comes after this one and all that begin with it.
fn after(mut modes: Vec<String>) -> Vec<String> {
    modes.push(String::from(char::MAX));
    modes
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

    fn volume(name: &str, size: &str, modes: &[&str]) -> PersistentVolume {
        let mut volume = build::volume(name, "fast", size);
        volume.spec.as_mut().unwrap().access_modes = Some(modes.iter().map(ToString::to_string).collect());
        volume
    }

    fn shelf(volumes: Vec<PersistentVolume>) -> (Cache<PersistentVolume>, Shelf) {
        let cache = Cache::default();
        let shelf = Shelf::new(cache.clone());
        for volume in volumes {
            put(&cache, &shelf, volume);
        }
        (cache, shelf)
    }

    fn put(cache: &Cache<PersistentVolume>, shelf: &Shelf, volume: PersistentVolume) {
        let name = volume.metadata.name.clone().unwrap();
        cache.observe_write(volume);
        shelf.refresh(&name);
    }

    const ONCE: &[&str] = &["ReadWriteOnce"];

    #[test]
    fn the_shelf_gives_what_a_search_of_all_would() {
        let all = vec![
            volume("big", "9Gi", ONCE),
            volume("b", "3Gi", ONCE),
            volume("a", "3Gi", ONCE),
            volume("small", "1Gi", ONCE),
            volume("shared", "2Gi", &["ReadWriteOnce", "ReadWriteMany"]),
            volume("read", "2Gi", &["ReadOnlyMany"]),
        ];
        let (_, shelf) = shelf(all.clone());
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
            let best = matching::best(&claim, &all, matching::Choice::Any).cloned();
            let taken = shelf.take(&claim, |_| {}).map(|(volume, _)| volume);
            assert_eq!(taken, best, "{size} {mode}");
        }
    }

    #[test]
    fn claims_at_the_same_time_take_different_volumes() {
        let (_, shelf) = shelf(vec![volume("a", "1Gi", ONCE), volume("b", "1Gi", ONCE)]);
        let claim = build::claim("ns", "c", Some("fast"), "1Gi");
        let returned = Arc::new(Mutex::new(Vec::new()));
        let heard = returned.clone();
        let name = |v: &PersistentVolume| v.metadata.name.clone().unwrap();
        let (first, hold) = shelf.take(&claim, move |v| heard.lock().push(name(v))).unwrap();
        let (second, _other) = shelf.take(&claim, |_| {}).unwrap();
        assert_eq!([name(&first), name(&second)], ["a", "b"]);
        assert!(shelf.take(&claim, |_| {}).is_none());
        drop(hold);
        assert_eq!(*returned.lock(), ["a"], "who waits for one hears that it is back");
        assert_eq!(name(&shelf.take(&claim, |_| {}).unwrap().0), "a");
    }

    #[test]
    fn only_free_volumes_are_on_the_shelf() {
        let (cache, shelf) = shelf(vec![volume("a", "1Gi", ONCE)]);
        let claim = build::claim("ns", "c", Some("fast"), "1Gi");
        let mut taken = volume("a", "1Gi", ONCE);
        taken.metadata.resource_version = Some("2".to_owned());
        taken.spec.as_mut().unwrap().claim_ref = Some(build::reference(&claim));
        put(&cache, &shelf, taken.clone());
        assert!(shelf.take(&claim, |_| {}).is_none());
        taken.metadata.resource_version = Some("3".to_owned());
        taken.spec.as_mut().unwrap().claim_ref = None;
        put(&cache, &shelf, taken);
        assert!(shelf.take(&claim, |_| {}).is_some());
    }
}
