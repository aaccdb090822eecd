//! Attachments whose state the driver contradicts in its list of published volumes.
//!
//! Contract: filled by the periodic verification. While an attachment is in the set, its call is made whatever its status
//! says. It leaves the set when a reconcile of it has succeeded, or when it no longer exists. If the set is lost, for
//! example in a restart, the next verification finds the same attachments again; until then their status stays wrong.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// Names of VolumeAttachments.
#[derive(Clone, Default)]
pub(super) struct Mismatches(Arc<Mutex<HashSet<String>>>);

impl Mismatches {
    pub(super) fn insert(&self, attachment: &str) {
        self.0.lock().insert(attachment.to_owned());
    }

    pub(super) fn contains(&self, attachment: &str) -> bool {
        self.0.lock().contains(attachment)
    }

    pub(super) fn remove(&self, attachment: &str) {
        self.0.lock().remove(attachment);
    }
}
