//! Who owns whom: the metadata of every object of every kind that can be deleted, kept current by watches.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use cleat_api::Key;
use cleat_runtime::Queue;
use cleat_runtime::metadata_watch::{self, MetadataHandler, PartialObjectMetadata};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{ApiResource, DynamicObject};
use kube::discovery::{Discovery, Scope, verbs};
use kube::{Api, Client, Resource as _};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::Subject;
use super::decide::{FOREGROUND, ORPHAN, Owner, Seen};
use super::uid::Uid;

/// A kind of objects that can be listed, watched and deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) resource: ApiResource,
    pub(super) namespaced: bool,
    pub(super) collections: bool,
}

impl Kind {
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

/// One object, as far as ownership goes, for whoever works on it.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) kind: Arc<Kind>,
    pub(super) key: Key,
    pub(super) uid: String,
    pub(super) owners: Vec<OwnerReference>,
    deleting: bool,
    finalizers: Vec<String>,
}

/// The same as it is kept: there is one for each object of the cluster, and most have no owners.
#[derive(Clone, Debug)]
struct Kept {
    kind: Arc<Kind>,
    namespace: Option<Arc<str>>,
    name: Box<str>,
    life: Life,
    #[expect(clippy::box_collection, reason = "a third of the room where there are none")]
    owners: Option<Box<Vec<OwnerReference>>>,
}

/// What a deletion of the object has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Life {
    deleting: bool,
    orphans: bool,
    foreground: bool,
}

impl Kept {
    fn owners(&self) -> &[OwnerReference] {
        self.owners.as_deref().map(Vec::as_slice).unwrap_or_default()
    }

    fn owner_uids(&self) -> impl Iterator<Item = Uid> {
        self.owners().iter().map(|owner| Uid::of(&owner.uid))
    }

    fn is_namespace(&self) -> bool {
        self.kind.resource.kind == "Namespace" && self.kind.resource.group.is_empty()
    }

    fn node(&self, uid: &Uid) -> Node {
        let finalizers = [(self.life.orphans, ORPHAN), (self.life.foreground, FOREGROUND)];
        Node {
            kind: self.kind.clone(),
            key: Key { namespace: self.namespace.as_deref().map(ToOwned::to_owned), name: self.name.to_string() },
            uid: uid.to_string(),
            owners: self.owners().to_vec(),
            deleting: self.life.deleting,
            finalizers: finalizers.iter().filter(|(has, _)| *has).map(|(_, name)| (*name).to_owned()).collect(),
        }
    }
}

fn same_owners(kept: &[OwnerReference], seen: &[metadata_watch::OwnerRef<'_>]) -> bool {
    let same = |(a, b): (&OwnerReference, &metadata_watch::OwnerRef<'_>)| {
        (&*a.uid, &*a.name, &*a.kind, &*a.api_version) == (&*b.uid, &*b.name, &*b.kind, &*b.api_version)
            && a.block_owner_deletion == b.block_owner_deletion
    };
    kept.len() == seen.len() && kept.iter().zip(seen).all(same)
}

fn reference(owner: &metadata_watch::OwnerRef<'_>) -> OwnerReference {
    OwnerReference {
        api_version: owner.api_version.to_string(),
        kind: owner.kind.to_string(),
        name: owner.name.to_string(),
        uid: owner.uid.to_string(),
        controller: owner.controller,
        block_owner_deletion: owner.block_owner_deletion,
    }
}

impl Node {
    pub(super) fn seen(&self, owners: Vec<(String, Owner)>, dependents: &[Node]) -> Seen {
        let blocks = |dependent: &&Node| {
            dependent.owners.iter().any(|o| o.uid == self.uid && o.block_owner_deletion == Some(true))
        };
        Seen {
            deleting: self.deleting,
            finalizers: self.finalizers.clone(),
            owners,
            dependents: dependents.len(),
            blocking: dependents.iter().filter(blocks).count(),
        }
    }

    /// What this object is to `dependent`. A namespaced owner owns nothing outside its namespace.
    pub(super) fn as_owner(&self, dependent: &Node) -> Owner {
        if self.kind.namespaced && self.key.namespace != dependent.key.namespace {
            return Owner::Absent;
        }
        match self.deleting && self.finalizers.iter().any(|f| f == FOREGROUND) {
            true => Owner::Waiting,
            false => Owner::Solid,
        }
    }
}

#[derive(Default)]
struct State {
    nodes: HashMap<Uid, Kept>,
    /// Uids of dependents by the uid of their owner, which need not be there.
    dependents: HashMap<Uid, HashSet<Uid>>,
    followed: Vec<(Arc<Kind>, CancellationToken)>,
    /// Namespaces that are being deleted.
    ending: HashSet<String>,
    /// The names of namespaces, each once.
    namespaces: HashSet<Arc<str>>,
}

impl State {
    /// The dependent is none of these owners' any more.
    fn part(&mut self, owners: impl IntoIterator<Item = Uid>, dependent: &Uid) {
        for owner in owners {
            if let Some(dependents) = self.dependents.get_mut(&owner) {
                dependents.remove(dependent);
                if dependents.is_empty() {
                    self.dependents.remove(&owner);
                }
            }
        }
    }

    fn namespace(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.namespaces.get(name) {
            return known.clone();
        }
        let name: Arc<str> = name.into();
        self.namespaces.insert(name.clone());
        name
    }
}

pub(super) struct Graph {
    state: Mutex<State>,
    queue: Queue<Subject>,
    /// How many kinds were not listed yet; none before the first are known.
    unlisted: watch::Sender<Option<usize>>,
}

/// Every kind that can be collected. Events are left out: they own nothing and end by themselves.
pub(super) async fn kinds(client: &Client) -> Result<Vec<Kind>, kube::Error> {
    let discovery = Discovery::new(client.clone()).run().await?;
    let mut found = Vec::new();
    for group in discovery.groups_alphabetical() {
        for (resource, can) in group.resources_by_stability() {
            let needed = [verbs::LIST, verbs::WATCH, verbs::DELETE, verbs::PATCH];
            if resource.kind == "Event" || !needed.iter().all(|verb| can.supports_operation(verb)) {
                continue;
            }
            found.push(Kind {
                collections: can.supports_operation(verbs::DELETE_COLLECTION),
                namespaced: can.scope == Scope::Namespaced,
                resource,
            });
        }
    }
    Ok(found)
}

impl Graph {
    pub(super) fn new(queue: Queue<Subject>) -> Self {
        Self { state: Mutex::default(), queue, unlisted: watch::Sender::new(None) }
    }

    /// Returns when every kind was listed once.
    pub(super) async fn synced(&self) {
        let mut unlisted = self.unlisted.subscribe();
        // The sender lives in self, so this cannot fail.
        let _ = unlisted.wait_for(|count| *count == Some(0)).await;
    }

    pub(super) fn get(&self, uid: &Uid) -> Option<Node> {
        self.state.lock().nodes.get(uid).map(|kept| kept.node(uid))
    }

    pub(super) fn dependents(&self, uid: &Uid) -> Vec<Node> {
        let state = self.state.lock();
        let uids = state.dependents.get(uid).into_iter().flatten();
        uids.filter_map(|dependent| Some(state.nodes.get(dependent)?.node(dependent))).collect()
    }

    pub(super) fn kinds(&self) -> Vec<Arc<Kind>> {
        self.state.lock().followed.iter().map(|(kind, _)| kind.clone()).collect()
    }

    /// Follows exactly these kinds from now on.
    pub(super) fn follow(
        self: &Arc<Self>,
        client: &Client,
        kinds: Vec<Kind>,
        stale: &Arc<Notify>,
        stop: &CancellationToken,
    ) {
        let mut fresh = Vec::new();
        {
            let mut state = self.state.lock();
            state.followed.retain(|(kind, stop)| {
                let stays = kinds.contains(kind);
                if !stays {
                    stop.cancel();
                }
                stays
            });
            let gone: Vec<Uid> = {
                let known = |node: &Kept| state.followed.iter().any(|(kind, _)| Arc::ptr_eq(kind, &node.kind));
                state.nodes.iter().filter(|(_, node)| !known(node)).map(|(uid, _)| uid.clone()).collect()
            };
            for uid in gone {
                self.forget(&mut state, &uid);
            }
            for kind in kinds {
                if state.followed.iter().any(|(known, _)| **known == kind) {
                    continue;
                }
                let (kind, stop) = (Arc::new(kind), stop.child_token());
                state.followed.push((kind.clone(), stop.clone()));
                fresh.push((kind, stop));
            }
        }
        self.unlisted.send_modify(|count| *count = Some(count.unwrap_or(0) + fresh.len()));
        for (kind, stop) in fresh {
            let (graph, client, stale) = (self.clone(), client.clone(), stale.clone());
            let path = DynamicObject::url_path(&kind.resource, None);
            let mut watch = Watch { graph, kind, stale, listed: HashSet::new(), first: true };
            tokio::spawn(async move {
                stop.run_until_cancelled(metadata_watch::watch_metadata(&client, &path, &mut watch)).await;
            });
        }
    }

    fn learn(&self, kind: &Arc<Kind>, meta: &PartialObjectMetadata<'_>) -> Uid {
        let uid = Uid::of(meta.uid.as_deref().unwrap_or_default());
        let life = Life {
            deleting: meta.is_deleting(),
            orphans: meta.has_finalizer(ORPHAN),
            foreground: meta.has_finalizer(FOREGROUND),
        };
        let mut state = self.state.lock();
        // Of most changes nothing is about ownership. What a namespace waits for may be elsewhere in it.
        let known = state.nodes.get(&uid).filter(|known| Arc::ptr_eq(&known.kind, kind));
        if known.is_some_and(|k| !k.is_namespace() && k.life == life && same_owners(k.owners(), meta.owners())) {
            return uid;
        }
        let owners: Vec<OwnerReference> = meta.owners().iter().map(reference).collect();
        let node = Kept {
            kind: kind.clone(),
            namespace: meta.namespace.as_deref().map(|name| state.namespace(name)),
            name: meta.name.as_deref().unwrap_or_default().into(),
            life,
            owners: Some(owners).filter(|owners| !owners.is_empty()).map(Box::new),
        };
        if node.is_namespace() && life.deleting {
            state.ending.insert(node.name.to_string());
            self.queue.add(Subject::Namespace(node.name.to_string()));
        }
        let owners: Vec<Uid> = node.owner_uids().collect();
        let before: Vec<Uid> = state.nodes.insert(uid.clone(), node).iter().flat_map(Kept::owner_uids).collect();
        state.part(before.iter().cloned(), &uid);
        for owner in &owners {
            state.dependents.entry(owner.clone()).or_default().insert(uid.clone());
        }
        let waits = life.deleting && (life.foreground || life.orphans);
        if !owners.is_empty() || waits {
            self.queue.add(Subject::Object(uid.clone()));
        }
        // Owners wait for their dependents to go or to let go.
        for owner in before.into_iter().chain(owners) {
            if state.nodes.get(&owner).is_some_and(|o| o.life.deleting) {
                self.queue.add(Subject::Object(owner));
            }
        }
        if life.deleting {
            self.wake_dependents(&state, &uid);
        }
        uid
    }

    fn forget(&self, state: &mut State, uid: &Uid) {
        let Some(node) = state.nodes.remove(uid) else { return };
        let owners: Vec<Uid> = node.owner_uids().collect();
        state.part(owners.iter().cloned(), uid);
        owners.into_iter().for_each(|owner| self.queue.add(Subject::Object(owner)));
        self.wake_dependents(state, uid);
        if let Some(namespace) = node.namespace.as_deref().filter(|name| state.ending.contains(*name)) {
            self.queue.add(Subject::Namespace(namespace.to_owned()));
        }
        if node.is_namespace() {
            state.ending.remove(&*node.name);
            state.namespaces.remove(&*node.name);
        }
    }

    fn wake_dependents(&self, state: &State, uid: &Uid) {
        for dependent in state.dependents.get(uid).into_iter().flatten() {
            self.queue.add(Subject::Object(dependent.clone()));
        }
    }

    /// What a complete list does not show is gone.
    fn keep_only(&self, kind: &Arc<Kind>, listed: &HashSet<Uid>) {
        let mut state = self.state.lock();
        let gone = |(uid, node): &(&Uid, &Kept)| Arc::ptr_eq(&node.kind, kind) && !listed.contains(uid);
        let gone: Vec<Uid> = state.nodes.iter().filter(gone).map(|(uid, _)| uid.clone()).collect();
        for uid in gone {
            self.forget(&mut state, &uid);
        }
    }
}

/// Tells the graph of one kind.
struct Watch {
    graph: Arc<Graph>,
    kind: Arc<Kind>,
    stale: Arc<Notify>,
    listed: HashSet<Uid>,
    first: bool,
}

impl Watch {
    fn was_listed(&mut self) {
        if std::mem::take(&mut self.first) {
            self.graph.unlisted.send_modify(|count| *count = count.map(|n| n.saturating_sub(1)));
        }
    }

    fn notice_definition(&self) {
        if self.kind.resource.kind == "CustomResourceDefinition" {
            self.stale.notify_one();
        }
    }
}

impl Drop for Watch {
    /// A kind that goes before it was listed is not waited for.
    fn drop(&mut self) {
        self.was_listed();
    }
}

impl MetadataHandler for Watch {
    fn list_started(&mut self) {
        self.listed.clear();
    }

    fn listed(&mut self, object: PartialObjectMetadata<'_>) {
        let uid = self.graph.learn(&self.kind, &object);
        // What became of its owners and dependents may have been missed.
        if !object.owners().is_empty() || object.is_deleting() {
            self.graph.queue.add(Subject::Object(uid.clone()));
        }
        self.listed.insert(uid);
    }

    fn list_completed(&mut self) {
        self.graph.keep_only(&self.kind, &std::mem::take(&mut self.listed));
        self.was_listed();
        // A definition may have come between discovery and this list.
        self.notice_definition();
    }

    fn applied(&mut self, object: PartialObjectMetadata<'_>) {
        self.graph.learn(&self.kind, &object);
        self.notice_definition();
    }

    fn deleted(&mut self, object: PartialObjectMetadata<'_>) {
        let uid = Uid::of(object.uid.as_deref().unwrap_or_default());
        self.graph.forget(&mut self.graph.state.lock(), &uid);
        self.notice_definition();
    }
}
