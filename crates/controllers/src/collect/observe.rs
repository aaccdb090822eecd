//! Who owns whom: the metadata of every object of every kind that can be deleted, kept current by watches.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::key::Meta as _;
use cleat_runtime::Queue;
use futures::StreamExt as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{ApiResource, DynamicObject};
use kube::core::PartialObjectMeta;
use kube::discovery::{Discovery, Scope, verbs};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch_objects};
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::Subject;
use super::decide::{FOREGROUND, ORPHAN, Owner, Seen};

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

/// One object, as far as ownership goes.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) kind: Arc<Kind>,
    pub(super) key: Key,
    pub(super) uid: String,
    pub(super) owners: Vec<OwnerReference>,
    deleting: bool,
    finalizers: Vec<String>,
}

impl Node {
    fn new(kind: Arc<Kind>, meta: &ObjectMeta) -> Self {
        Self {
            kind,
            key: Key::of(meta),
            uid: meta.uid().to_owned(),
            owners: meta.owner_references.clone().unwrap_or_default(),
            deleting: meta.is_deleting(),
            finalizers: meta.finalizers.clone().unwrap_or_default(),
        }
    }

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
    nodes: HashMap<String, Node>,
    /// Uids of dependents by the uid of their owner, which need not be there.
    dependents: HashMap<String, HashSet<String>>,
    followed: Vec<(Arc<Kind>, CancellationToken)>,
    /// Namespaces that are being deleted.
    ending: HashSet<String>,
}

impl State {
    /// The dependent is none of these owners' any more.
    fn part<'a>(&mut self, owners: impl IntoIterator<Item = &'a OwnerReference>, dependent: &str) {
        for owner in owners {
            if let Some(dependents) = self.dependents.get_mut(&owner.uid) {
                dependents.remove(dependent);
                if dependents.is_empty() {
                    self.dependents.remove(&owner.uid);
                }
            }
        }
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

    pub(super) fn get(&self, uid: &str) -> Option<Node> {
        self.state.lock().nodes.get(uid).cloned()
    }

    pub(super) fn dependents(&self, uid: &str) -> Vec<Node> {
        let state = self.state.lock();
        let uids = state.dependents.get(uid).into_iter().flatten();
        uids.filter_map(|dependent| state.nodes.get(dependent).cloned()).collect()
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
            let gone: Vec<String> = {
                let known = |node: &Node| state.followed.iter().any(|(kind, _)| Arc::ptr_eq(kind, &node.kind));
                state.nodes.values().filter(|node| !known(node)).map(|node| node.uid.clone()).collect()
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
            tokio::spawn(async move {
                stop.run_until_cancelled(graph.watch(&client, kind, &stale)).await;
            });
        }
    }

    async fn watch(&self, client: &Client, kind: Arc<Kind>, stale: &Notify) {
        let defines = kind.resource.kind == "CustomResourceDefinition";
        let api: Api<PartialObjectMeta<DynamicObject>> = Api::all_with(client.clone(), &kind.resource);
        let mut events = std::pin::pin!(watch_objects(api, watcher::Config::default()).default_backoff());
        let mut listed: HashSet<String> = HashSet::new();
        let mut first = true;
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listed.clear(),
                Ok(Event::InitApply(object)) => {
                    listed.insert(object.metadata.uid().to_owned());
                    self.learn(&kind, &object.metadata);
                }
                Ok(Event::InitDone) => {
                    self.keep_only(&kind, &listed);
                    if std::mem::take(&mut first) {
                        self.unlisted.send_modify(|count| *count = count.map(|n| n.saturating_sub(1)));
                    }
                }
                Ok(Event::Apply(object)) => {
                    self.learn(&kind, &object.metadata);
                    if defines {
                        stale.notify_one();
                    }
                }
                Ok(Event::Delete(object)) => {
                    self.forget(&mut self.state.lock(), object.metadata.uid());
                    if defines {
                        stale.notify_one();
                    }
                }
                Err(error) => debug!(%error, kind = kind.resource.kind, "watch starts over"),
            }
        }
    }

    fn learn(&self, kind: &Arc<Kind>, meta: &ObjectMeta) {
        let node = Node::new(kind.clone(), meta);
        let mut state = self.state.lock();
        let is_namespace = kind.resource.kind == "Namespace" && kind.resource.group.is_empty();
        if is_namespace && node.deleting {
            state.ending.insert(node.key.name.clone());
            self.queue.add(Subject::Namespace(node.key.name.clone()));
        }
        let before = state.nodes.insert(node.uid.clone(), node.clone());
        state.part(before.iter().flat_map(|b| &b.owners), &node.uid);
        for owner in &node.owners {
            state.dependents.entry(owner.uid.clone()).or_default().insert(node.uid.clone());
        }
        let waits = node.deleting && node.finalizers.iter().any(|f| f == FOREGROUND || f == ORPHAN);
        if !node.owners.is_empty() || waits {
            self.queue.add(Subject::Object(node.uid.clone()));
        }
        // Owners wait for their dependents to go or to let go.
        for owner in before.iter().flat_map(|b| &b.owners).chain(&node.owners) {
            if state.nodes.get(&owner.uid).is_some_and(|o| o.deleting) {
                self.queue.add(Subject::Object(owner.uid.clone()));
            }
        }
        if node.deleting {
            self.wake_dependents(&state, &node.uid);
        }
    }

    fn forget(&self, state: &mut State, uid: &str) {
        let Some(node) = state.nodes.remove(uid) else { return };
        state.part(&node.owners, uid);
        for owner in &node.owners {
            self.queue.add(Subject::Object(owner.uid.clone()));
        }
        self.wake_dependents(state, uid);
        if let Some(namespace) = node.key.namespace.as_ref().filter(|n| state.ending.contains(*n)) {
            self.queue.add(Subject::Namespace(namespace.clone()));
        }
        if node.kind.resource.kind == "Namespace" {
            state.ending.remove(&node.key.name);
        }
    }

    fn wake_dependents(&self, state: &State, uid: &str) {
        for dependent in state.dependents.get(uid).into_iter().flatten() {
            self.queue.add(Subject::Object(dependent.clone()));
        }
    }

    /// What a complete list does not show is gone.
    fn keep_only(&self, kind: &Arc<Kind>, listed: &HashSet<String>) {
        let mut state = self.state.lock();
        let gone: Vec<String> = state
            .nodes
            .values()
            .filter(|node| Arc::ptr_eq(&node.kind, kind) && !listed.contains(&node.uid))
            .map(|node| node.uid.clone())
            .collect();
        for uid in gone {
            self.forget(&mut state, &uid);
        }
    }
}
