//! The ownership graph: what the collector remembers of every object that can be deleted, namely its name, its owners
//! and the state of its deletion. Watches keep it current (see `observe`).
//!
//! Contract: nothing here is stored. After a restart the graph is built again from a list of every kind, and the
//! collector does not work before that is complete: a dependent that is not listed yet would not block its owner. An
//! owner that the graph does not contain counts as absent only after a live read.
//!
//! Each change queues the objects whose decision it may change: the object, its owners, its dependents, and its
//! namespace.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use cleat_api::Key;
use cleat_runtime::Queue;
use cleat_runtime::metadata_watch::{OwnerRef, PartialObjectMetadata};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{ApiResource, DynamicObject};
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::CollectionKey;
use super::decide::{FOREGROUND_FINALIZER, ORPHAN_FINALIZER, ObjectSnapshot, OwnerState};
use super::uid::Uid;

/// A kind of objects that can be listed, watched and deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResourceKind {
    pub(super) resource: ApiResource,
    pub(super) namespaced: bool,
    /// The kind supports the verb `deletecollection`.
    pub(super) deletes_collections: bool,
}

impl ResourceKind {
    /// Returns the plural and the group: `pods.` or `things.example.com`.
    pub(super) fn name(&self) -> String {
        format!("{}.{}", self.resource.plural, self.resource.group)
    }

    pub(super) fn api(&self, client: &Client, namespace: Option<&str>) -> Api<DynamicObject> {
        match namespace.filter(|_| self.namespaced) {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &self.resource),
            None => Api::all_with(client.clone(), &self.resource),
        }
    }
}

/// One object of the graph, expanded for a reconcile.
#[derive(Clone, Debug)]
pub(super) struct GraphObject {
    pub(super) kind: Arc<ResourceKind>,
    pub(super) key: Key,
    pub(super) uid: String,
    pub(super) owners: Vec<OwnerReference>,
    deleting: bool,
    /// Only the finalizers `orphan` and `foregroundDeletion`.
    finalizers: Vec<String>,
}

impl GraphObject {
    pub(super) fn snapshot(&self, owners: Vec<(String, OwnerState)>, dependents: &[Self]) -> ObjectSnapshot {
        let blocks = |dependent: &&Self| {
            dependent.owners.iter().any(|o| o.uid == self.uid && o.block_owner_deletion == Some(true))
        };
        ObjectSnapshot {
            deleting: self.deleting,
            finalizers: self.finalizers.clone(),
            owners,
            dependents: dependents.len(),
            blocking_dependents: dependents.iter().filter(blocks).count(),
        }
    }

    /// Returns the state of this object as an owner of `dependent`. A namespaced object owns nothing outside its
    /// namespace.
    pub(super) fn owner_state(&self, dependent: &Self) -> OwnerState {
        if self.kind.namespaced && self.key.namespace != dependent.key.namespace {
            return OwnerState::Absent;
        }
        match self.deleting && self.finalizers.iter().any(|f| f == FOREGROUND_FINALIZER) {
            true => OwnerState::WaitingForDependents,
            false => OwnerState::Exists,
        }
    }
}

/// One object as the graph stores it. The graph contains every object of the cluster and most have no owners, so this
/// is small.
#[derive(Clone, Debug)]
struct StoredObject {
    kind: Arc<ResourceKind>,
    namespace: Option<Arc<str>>,
    name: Box<str>,
    deletion: DeletionState,
    #[expect(clippy::box_collection, reason = "an absent Box takes a third of the size of an empty Vec")]
    owners: Option<Box<Vec<OwnerReference>>>,
}

/// The part of an object's metadata that concerns its deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DeletionState {
    deleting: bool,
    orphan_finalizer: bool,
    foreground_finalizer: bool,
}

impl StoredObject {
    fn owners(&self) -> &[OwnerReference] {
        self.owners.as_deref().map(Vec::as_slice).unwrap_or_default()
    }

    fn owner_uids(&self) -> impl Iterator<Item = Uid> {
        self.owners().iter().map(|owner| Uid::parse(&owner.uid))
    }

    fn is_namespace(&self) -> bool {
        self.kind.resource.kind == "Namespace" && self.kind.resource.group.is_empty()
    }

    fn expand(&self, uid: &Uid) -> GraphObject {
        let finalizers = [
            (self.deletion.orphan_finalizer, ORPHAN_FINALIZER),
            (self.deletion.foreground_finalizer, FOREGROUND_FINALIZER),
        ];
        GraphObject {
            kind: self.kind.clone(),
            key: Key { namespace: self.namespace.as_deref().map(ToOwned::to_owned), name: self.name.to_string() },
            uid: uid.to_string(),
            owners: self.owners().to_vec(),
            deleting: self.deletion.deleting,
            finalizers: finalizers.iter().filter(|(present, _)| *present).map(|(_, f)| (*f).to_owned()).collect(),
        }
    }
}

fn are_same_owners(stored: &[OwnerReference], observed: &[OwnerRef<'_>]) -> bool {
    let is_same = |(a, b): (&OwnerReference, &OwnerRef<'_>)| {
        (&*a.uid, &*a.name, &*a.kind, &*a.api_version) == (&*b.uid, &*b.name, &*b.kind, &*b.api_version)
            && a.block_owner_deletion == b.block_owner_deletion
    };
    stored.len() == observed.len() && stored.iter().zip(observed).all(is_same)
}

fn owner_reference(owner: &OwnerRef<'_>) -> OwnerReference {
    OwnerReference {
        api_version: owner.api_version.to_string(),
        kind: owner.kind.to_string(),
        name: owner.name.to_string(),
        uid: owner.uid.to_string(),
        controller: owner.controller,
        block_owner_deletion: owner.block_owner_deletion,
    }
}

#[derive(Default)]
struct GraphState {
    objects: HashMap<Uid, StoredObject>,
    /// Uids of the dependents by the uid of their owner. The owner may be unknown.
    dependents: HashMap<Uid, HashSet<Uid>>,
    /// The kinds that are watched, each with the token that ends its watch.
    watched: Vec<(Arc<ResourceKind>, CancellationToken)>,
    /// Names of the namespaces that are being deleted.
    deleting_namespaces: HashSet<String>,
    /// Names of namespaces, to share one allocation per name.
    namespace_names: HashSet<Arc<str>>,
}

impl GraphState {
    fn remove_dependent(&mut self, owners: impl IntoIterator<Item = Uid>, dependent: &Uid) {
        for owner in owners {
            if let Some(dependents) = self.dependents.get_mut(&owner) {
                dependents.remove(dependent);
                if dependents.is_empty() {
                    self.dependents.remove(&owner);
                }
            }
        }
    }

    fn shared_name(&mut self, namespace: &str) -> Arc<str> {
        if let Some(name) = self.namespace_names.get(namespace) {
            return name.clone();
        }
        let name: Arc<str> = namespace.into();
        self.namespace_names.insert(name.clone());
        name
    }
}

pub(super) struct OwnershipGraph {
    state: Mutex<GraphState>,
    queue: Queue<CollectionKey>,
    /// How many watched kinds were not listed yet; `None` before the first discovery.
    unlisted_kinds: watch::Sender<Option<usize>>,
}

impl OwnershipGraph {
    pub(super) fn new(queue: Queue<CollectionKey>) -> Self {
        Self { state: Mutex::default(), queue, unlisted_kinds: watch::Sender::new(None) }
    }

    /// Returns when every kind was listed once.
    pub(super) async fn synced(&self) {
        let mut unlisted = self.unlisted_kinds.subscribe();
        // The sender lives in self, so this cannot fail.
        let _ = unlisted.wait_for(|count| *count == Some(0)).await;
    }

    pub(super) fn get(&self, uid: &Uid) -> Option<GraphObject> {
        self.state.lock().objects.get(uid).map(|object| object.expand(uid))
    }

    pub(super) fn dependents(&self, uid: &Uid) -> Vec<GraphObject> {
        let state = self.state.lock();
        let uids = state.dependents.get(uid).into_iter().flatten();
        uids.filter_map(|dependent| Some(state.objects.get(dependent)?.expand(dependent))).collect()
    }

    pub(super) fn contains_owners_of(&self, object: &GraphObject) -> bool {
        let state = self.state.lock();
        object.owners.iter().all(|owner| state.objects.contains_key(&Uid::parse(&owner.uid)))
    }

    /// Returns the kinds that are watched.
    pub(super) fn kinds(&self) -> Vec<Arc<ResourceKind>> {
        self.state.lock().watched.iter().map(|(kind, _)| kind.clone()).collect()
    }

    /// Replaces the set of watched kinds. Ends the watches of the other kinds and removes their objects. Returns the
    /// kinds that the caller must start to watch, each until its token is cancelled.
    pub(super) fn set_kinds(
        &self,
        kinds: Vec<ResourceKind>,
        stop: &CancellationToken,
    ) -> Vec<(Arc<ResourceKind>, CancellationToken)> {
        let mut added = Vec::new();
        {
            let mut state = self.state.lock();
            state.watched.retain(|(kind, stop)| {
                let stays = kinds.contains(kind);
                if !stays {
                    stop.cancel();
                }
                stays
            });
            let is_watched =
                |object: &StoredObject| state.watched.iter().any(|(kind, _)| Arc::ptr_eq(kind, &object.kind));
            let unwatched = state.objects.iter().filter(|(_, object)| !is_watched(object));
            let unwatched: Vec<Uid> = unwatched.map(|(uid, _)| uid.clone()).collect();
            for uid in unwatched {
                self.remove_locked(&mut state, &uid);
            }
            for kind in kinds {
                if state.watched.iter().any(|(watched, _)| **watched == kind) {
                    continue;
                }
                let (kind, stop) = (Arc::new(kind), stop.child_token());
                state.watched.push((kind.clone(), stop.clone()));
                added.push((kind, stop));
            }
        }
        self.unlisted_kinds.send_modify(|count| *count = Some(count.unwrap_or(0) + added.len()));
        added
    }

    /// Must be called once for each kind that [`Self::set_kinds`] returned: after its first list, or when its watch
    /// ends before.
    pub(super) fn kind_was_listed(&self) {
        self.unlisted_kinds.send_modify(|count| *count = count.map(|n| n.saturating_sub(1)));
    }

    pub(super) fn queue_object(&self, uid: Uid) {
        self.queue.add(CollectionKey::Object(uid));
    }

    /// Stores the object and queues what the change concerns.
    pub(super) fn insert(&self, kind: &Arc<ResourceKind>, meta: &PartialObjectMetadata<'_>) -> Uid {
        let uid = Uid::parse(meta.uid.as_deref().unwrap_or_default());
        let deletion = DeletionState {
            deleting: meta.is_deleting(),
            orphan_finalizer: meta.has_finalizer(ORPHAN_FINALIZER),
            foreground_finalizer: meta.has_finalizer(FOREGROUND_FINALIZER),
        };
        let mut state = self.state.lock();
        // Most changes concern neither owners nor deletion. A namespace is always processed, because its deletion may
        // wait for something that this object's metadata does not show.
        let stored = state.objects.get(&uid).filter(|stored| Arc::ptr_eq(&stored.kind, kind));
        let is_unchanged = |stored: &StoredObject| {
            !stored.is_namespace() && stored.deletion == deletion && are_same_owners(stored.owners(), meta.owners())
        };
        if stored.is_some_and(is_unchanged) {
            return uid;
        }
        let owners: Vec<OwnerReference> = meta.owners().iter().map(owner_reference).collect();
        let object = StoredObject {
            kind: kind.clone(),
            namespace: meta.namespace.as_deref().map(|name| state.shared_name(name)),
            name: meta.name.as_deref().unwrap_or_default().into(),
            deletion,
            owners: Some(owners).filter(|owners| !owners.is_empty()).map(Box::new),
        };
        if object.is_namespace() && deletion.deleting {
            state.deleting_namespaces.insert(object.name.to_string());
            self.queue.add(CollectionKey::Namespace(object.name.to_string()));
        }
        let owners: Vec<Uid> = object.owner_uids().collect();
        let replaced = state.objects.insert(uid.clone(), object);
        let old_owners: Vec<Uid> = replaced.iter().flat_map(StoredObject::owner_uids).collect();
        state.remove_dependent(old_owners.iter().cloned(), &uid);
        for owner in &owners {
            state.dependents.entry(owner.clone()).or_default().insert(uid.clone());
        }
        let waits_for_collector = deletion.deleting && (deletion.foreground_finalizer || deletion.orphan_finalizer);
        if !owners.is_empty() || waits_for_collector {
            self.queue_object(uid.clone());
        }
        // An owner that is being deleted waits until its dependents are deleted or drop their reference.
        for owner in old_owners.into_iter().chain(owners) {
            if state.objects.get(&owner).is_some_and(|o| o.deletion.deleting) {
                self.queue_object(owner);
            }
        }
        if deletion.deleting {
            self.queue_dependents(&state, &uid);
        }
        uid
    }

    /// Removes the object and queues what the change concerns.
    pub(super) fn remove(&self, uid: &Uid) {
        self.remove_locked(&mut self.state.lock(), uid);
    }

    /// Removes the objects of this kind that a complete list does not contain.
    pub(super) fn retain_listed(&self, kind: &Arc<ResourceKind>, listed: &HashSet<Uid>) {
        let mut state = self.state.lock();
        let is_gone = |(uid, object): &(&Uid, &StoredObject)| Arc::ptr_eq(&object.kind, kind) && !listed.contains(uid);
        let gone: Vec<Uid> = state.objects.iter().filter(is_gone).map(|(uid, _)| uid.clone()).collect();
        for uid in gone {
            self.remove_locked(&mut state, &uid);
        }
    }

    fn remove_locked(&self, state: &mut GraphState, uid: &Uid) {
        let Some(object) = state.objects.remove(uid) else { return };
        let owners: Vec<Uid> = object.owner_uids().collect();
        state.remove_dependent(owners.iter().cloned(), uid);
        owners.into_iter().for_each(|owner| self.queue_object(owner));
        self.queue_dependents(state, uid);
        if let Some(namespace) = object.namespace.as_deref().filter(|name| state.deleting_namespaces.contains(*name)) {
            self.queue.add(CollectionKey::Namespace(namespace.to_owned()));
        }
        if object.is_namespace() {
            state.deleting_namespaces.remove(&*object.name);
            state.namespace_names.remove(&*object.name);
        }
    }

    fn queue_dependents(&self, state: &GraphState, uid: &Uid) {
        for dependent in state.dependents.get(uid).into_iter().flatten() {
            self.queue_object(dependent.clone());
        }
    }
}
