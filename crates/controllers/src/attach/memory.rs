//! Holds the facts that the attach/detach controller remembers between reconciles.
//!
//! Each reconcile reads the desired state (pods) and the actual state (VolumeAttachments and Node status) from the
//! caches. This module holds what no cache shows. It decides nothing and sends no requests. Nothing is written to disk:
//! a restart loses everything, and the controller stays correct then. [`RememberedFacts`] says for each fact when it is
//! recorded and cleared, and what a restart means.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use cleat_runtime::Change;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;

use super::decide::Need;
use super::observe::{elapsed, volumes_in_use};

/// Clones share the same facts. The lock is held for single map operations only.
#[derive(Clone, Default)]
pub(super) struct AttachMemory(Arc<Mutex<RememberedFacts>>);

#[derive(Default)]
struct RememberedFacts {
    /// The last `status.volumesInUse` of deleted Nodes, by node name: the machine may still be running. Recorded when a
    /// Node is deleted, cleared when a Node of that name exists again. After a restart the usage is unknown, which
    /// counts as in use.
    last_volumes_in_use: HashMap<String, Vec<String>>,
    /// Names of attachments that existed when the controller started or that it has created. Attachments of other
    /// clients block their volume, but the controller does not delete them. Recorded before the create request, cleared
    /// when the attachment is gone. After a restart all existing attachments are owned.
    owned_attachments: HashSet<String>,
    /// Since when no pod needs an attachment, by attachment name. Recorded when a snapshot first finds it unneeded,
    /// cleared when a pod needs it again or it is gone. After a restart the time starts at zero: a forced detach is
    /// late, never early.
    unneeded_since: HashMap<String, Timestamp>,
    /// Attachments that may exist although the server has not confirmed it, by unique volume name. Recorded before the
    /// create request, cleared when the server has answered. After a restart the first list shows which of them exist.
    pending_creates: HashMap<String, Vec<VolumeAttachment>>,
    /// Names of attachments that may be deleted although the server has not confirmed it. Recorded when a delete
    /// request failed or got no answer, cleared when the live object was read or the attachment is gone. After a
    /// restart the first list shows which of them exist.
    uncertain_deletes: HashSet<String>,
}

impl AttachMemory {
    /// Takes ownership of the attachments that exist at start. Call it once, after the caches have synced.
    pub(super) fn adopt(&self, attachment_names: impl Iterator<Item = String>) {
        self.0.lock().owned_attachments.extend(attachment_names);
    }

    pub(super) fn is_owned(&self, attachment: &str) -> bool {
        self.0.lock().owned_attachments.contains(attachment)
    }

    /// Records that the attachment may exist from now on, and that this controller owns it. Call it before the request.
    pub(super) fn add_pending_create(&self, unique_name: &str, attachment: &VolumeAttachment) {
        let mut facts = self.0.lock();
        facts.owned_attachments.extend(attachment.metadata.name.clone());
        let pending = facts.pending_creates.entry(unique_name.to_owned()).or_default();
        if !pending.iter().any(|other| other.metadata.name == attachment.metadata.name) {
            pending.push(attachment.clone());
        }
    }

    /// Records that the server has answered the create request.
    pub(super) fn remove_pending_create(&self, unique_name: &str, attachment: &VolumeAttachment) {
        let pending_creates = &mut self.0.lock().pending_creates;
        if let Some(pending) = pending_creates.get_mut(unique_name) {
            pending.retain(|other| other.metadata.name != attachment.metadata.name);
            if pending.is_empty() {
                pending_creates.remove(unique_name);
            }
        }
    }

    pub(super) fn pending_creates(&self, unique_name: &str) -> Vec<VolumeAttachment> {
        self.0.lock().pending_creates.get(unique_name).cloned().unwrap_or_default()
    }

    /// Records that the attachment may be deleted: the request failed or got no answer.
    pub(super) fn add_uncertain_delete(&self, attachment: &str) {
        self.0.lock().uncertain_deletes.insert(attachment.to_owned());
    }

    /// Records that the live object was read. For an object that is gone, the entry stays until the cache shows that
    /// too: [`AttachMemory::record_attachment_change`] removes it.
    pub(super) fn remove_uncertain_delete(&self, attachment: &str) {
        self.0.lock().uncertain_deletes.remove(attachment);
    }

    pub(super) fn has_uncertain_deletes(&self) -> bool {
        !self.0.lock().uncertain_deletes.is_empty()
    }

    pub(super) fn is_delete_uncertain(&self, attachment: &str) -> bool {
        self.0.lock().uncertain_deletes.contains(attachment)
    }

    /// Removes everything about an attachment that is gone.
    pub(super) fn record_attachment_change(&self, change: &Change<VolumeAttachment>) {
        if let Change::Deleted(deleted) = change {
            let name = deleted.metadata.name.as_deref().unwrap_or_default();
            let mut facts = self.0.lock();
            facts.owned_attachments.remove(name);
            facts.unneeded_since.remove(name);
            facts.uncertain_deletes.remove(name);
        }
    }

    pub(super) fn record_node_change(&self, change: &Change<Node>) {
        let name = change.object().metadata.name.clone().unwrap_or_default();
        let last_volumes_in_use = &mut self.0.lock().last_volumes_in_use;
        match change {
            Change::Applied { .. } => last_volumes_in_use.remove(&name),
            Change::Deleted(node) => last_volumes_in_use.insert(name, volumes_in_use(node)),
        };
    }

    /// What the deleted Node of this name had in use. `None` if this process did not see its deletion.
    pub(super) fn last_volumes_in_use(&self, node: &str) -> Option<Vec<String>> {
        self.0.lock().last_volumes_in_use.get(node).cloned()
    }

    /// Returns for how long no pod has needed the attachment. The first call with `is_needed == false` starts the time;
    /// a call with `is_needed == true` resets it.
    pub(super) fn track_need(&self, attachment: &str, is_needed: bool, now: Timestamp) -> Need {
        let unneeded_since = &mut self.0.lock().unneeded_since;
        if is_needed {
            unneeded_since.remove(attachment);
            return Need::Needed;
        }
        Need::UnneededFor(elapsed(*unneeded_since.entry(attachment.to_owned()).or_insert(now), now))
    }
}
