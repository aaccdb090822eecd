//! Index of available volumes in the order in which claims take them: by class, then fewest access modes, then smallest
//! capacity, then name.
//!
//! Owns the order only. It reads no cache and knows no reservations: `memory` decides which volumes are in the index.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use cleat_api::claim::{capacity, claim_class, requested_storage, volume_class};
use cleat_api::quantity::Quantity;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

use super::matching;

/// Access modes, capacity, name.
type SortKey = (Vec<String>, Option<Quantity>, String);

#[derive(Default)]
pub(super) struct AvailableVolumes {
    /// By class, then by the number of access modes.
    by_class: HashMap<String, BTreeMap<usize, BTreeMap<SortKey, Arc<PersistentVolume>>>>,
    /// The class, the number of access modes and the sort key of each volume, by its name.
    positions: HashMap<String, (String, usize, SortKey)>,
}

impl AvailableVolumes {
    /// Returns the volume that [`matching::find_best`] would choose among all volumes of the index.
    pub(super) fn find(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolume>> {
        let wanted = requested_storage(claim);
        let by_mode_count = self.by_class.get(claim_class(claim).unwrap_or_default())?;
        // Volumes with the same number of modes may have different modes. Each set of modes is sorted by capacity, so
        // the search jumps from one set to the next and compares the best volume of each.
        by_mode_count.values().find_map(|volumes| {
            let mut best: Option<(&SortKey, &Arc<PersistentVolume>)> = None;
            let mut from = (Vec::new(), None, String::new());
            while let Some(((modes, _, _), _)) = volumes.range(from.clone()..).next() {
                let modes = modes.clone();
                let fit = volumes
                    .range((modes.clone(), wanted, String::new())..)
                    .take_while(|((m, _, _), _)| *m == modes)
                    .find(|(_, volume)| matching::satisfies(volume, claim));
                if let Some((key, volume)) = fit
                    && best.is_none_or(|((_, size, name), _)| (&key.1, &key.2) < (size, name))
                {
                    best = Some((key, volume));
                }
                from = (next_modes(modes), None, String::new());
            }
            best.map(|(_, volume)| volume.clone())
        })
    }

    pub(super) fn insert(&mut self, volume: Arc<PersistentVolume>) {
        let name = volume.metadata.name.clone().unwrap_or_default();
        let modes: Vec<String> =
            cleat_api::matching::access_modes(&volume).into_iter().map(ToOwned::to_owned).collect();
        let (class, mode_count) = (volume_class(&volume).to_owned(), modes.len());
        let key = (modes, capacity(&volume), name.clone());
        let volumes = self.by_class.entry(class.clone()).or_default().entry(mode_count).or_default();
        volumes.insert(key.clone(), volume);
        self.positions.insert(name, (class, mode_count, key));
    }

    /// Returns true if the volume was in the index.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        let Some((class, mode_count, key)) = self.positions.remove(name) else { return false };
        if let Some(by_mode_count) = self.by_class.get_mut(&class) {
            if let Some(volumes) = by_mode_count.get_mut(&mode_count) {
                volumes.remove(&key);
                if volumes.is_empty() {
                    by_mode_count.remove(&mode_count);
                }
            }
            if by_mode_count.is_empty() {
                self.by_class.remove(&class);
            }
        }
        true
    }
}

/// Returns the least list of modes that sorts after `modes` and after every list that starts with `modes`.
fn next_modes(mut modes: Vec<String>) -> Vec<String> {
    modes.push(String::from(char::MAX));
    modes
}
