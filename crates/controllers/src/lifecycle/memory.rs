//! What the node lifecycle controller remembers between reconciles: when it started, and when each node last changed.
//!
//! Contract: nothing here is stored. After a restart these times are counted from the restart on, so that nodes and pods
//! get more time than configured and never less. An entry stays when its node is deleted, because its pods still need
//! it.

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use parking_lot::Mutex;

#[derive(Clone)]
pub(super) struct NodeTimes {
    started_at: Timestamp,
    /// When this process observed that a node was created or deleted or that its taints changed, by the node's name.
    changed_at: Arc<Mutex<HashMap<String, Timestamp>>>,
}

impl NodeTimes {
    pub(super) fn new(now: Timestamp) -> Self {
        Self { started_at: now, changed_at: Arc::default() }
    }

    /// Returns when this process started to watch. It cannot tell whether a node was silent before.
    pub(super) fn started_at(&self) -> Timestamp {
        self.started_at
    }

    pub(super) fn record_change(&self, node: &str, now: Timestamp) {
        self.changed_at.lock().insert(node.to_owned(), now);
    }

    /// Returns the time of the node's last change. A node that was never observed counts as changed `now`: it is
    /// missing since the first reconcile of one of its pods.
    pub(super) fn changed_at(&self, node: &str, now: Timestamp) -> Timestamp {
        *self.changed_at.lock().entry(node.to_owned()).or_insert(now)
    }
}
