//! Objects as they were just written, for whoever changes them next: most are changed again within moments, and need not
//! be read from their text for that. Only the latest are kept, and each for one change.

use std::sync::Arc;

use cleat_store::Revision;
use parking_lot::Mutex;

use crate::kind::Object;

const PLACES: usize = 2048;
/// The text of what is kept is no longer than this: the rest is not worth its memory.
const LONGEST: usize = 8 << 10;

type Place = Mutex<Option<(Revision, Arc<dyn Object>)>>;

/// By the revision of the write: it alone tells which object of which kind it is.
pub struct Recent(Box<[Place]>);

impl Default for Recent {
    fn default() -> Self {
        Self((0..PLACES).map(|_| Place::default()).collect())
    }
}

impl Recent {
    fn place(&self, revision: Revision) -> &Place {
        &self.0[revision as usize % PLACES]
    }

    /// With the length of its text.
    pub fn keep(&self, revision: Revision, length: usize, object: Arc<dyn Object>) {
        if length <= LONGEST {
            *self.place(revision).lock() = Some((revision, object));
        }
    }

    pub fn take(&self, revision: Revision) -> Option<Arc<dyn Object>> {
        self.place(revision).lock().take_if(|(kept, _)| *kept == revision).map(|(_, object)| object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ConfigMap;

    #[test]
    fn an_object_is_there_for_one_change_of_its_own_revision() {
        let recent = Recent::default();
        let object = || -> Arc<dyn Object> { Arc::new(ConfigMap::default()) };
        recent.keep(7, LONGEST + 1, object());
        assert!(recent.take(7).is_none(), "it is too large");
        recent.keep(7, 1, object());
        assert!(recent.take(7 + PLACES as u64).is_none() && recent.take(8).is_none());
        assert!(recent.take(7).is_some());
        assert!(recent.take(7).is_none());
        recent.keep(7, 1, object());
        recent.keep(7 + PLACES as u64, 1, object());
        assert!(recent.take(7).is_none(), "it has made room");
    }
}
