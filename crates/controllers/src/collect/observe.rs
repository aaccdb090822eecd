//! Feeds the ownership graph from discovery and watches, and reads owners and namespaces live. Writes nothing to the
//! server.

use std::collections::HashSet;
use std::sync::Arc;

use cleat_api::key::Meta as _;
use cleat_runtime::metadata_watch::{self, MetadataHandler, PartialObjectMetadata};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DynamicObject, ListParams};
use kube::discovery::{Discovery, Scope, verbs};
use kube::{Client, Resource as _};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::Collector;
use super::act::{CollectError, request_failed, status_code};
use super::decide::{NamespaceSnapshot, NamespacedObject, OwnerState};
use super::memory::{GraphObject, OwnershipGraph, ResourceKind};
use super::uid::Uid;

/// Returns every kind that can be collected. Events are left out: they own nothing and expire.
pub(super) async fn discover_kinds(client: &Client) -> Result<Vec<ResourceKind>, kube::Error> {
    let discovery = Discovery::new(client.clone()).run().await?;
    let mut kinds = Vec::new();
    for group in discovery.groups_alphabetical() {
        for (resource, capabilities) in group.resources_by_stability() {
            let needed = [verbs::LIST, verbs::WATCH, verbs::DELETE, verbs::PATCH];
            if resource.kind == "Event" || !needed.iter().all(|verb| capabilities.supports_operation(verb)) {
                continue;
            }
            kinds.push(ResourceKind {
                deletes_collections: capabilities.supports_operation(verbs::DELETE_COLLECTION),
                namespaced: capabilities.scope == Scope::Namespaced,
                resource,
            });
        }
    }
    Ok(kinds)
}

/// Watches exactly these kinds from now on. Notifies `rediscover` when a CustomResourceDefinition changes.
pub(super) fn watch_kinds(
    graph: &Arc<OwnershipGraph>,
    client: &cleat_runtime::Client,
    kinds: Vec<ResourceKind>,
    rediscover: &Arc<Notify>,
    stop: &CancellationToken,
) {
    for (kind, stop) in graph.set_kinds(kinds, stop) {
        let (graph, client, rediscover) = (graph.clone(), client.clone(), rediscover.clone());
        let path = DynamicObject::url_path(&kind.resource, None);
        let mut watch = KindWatch { graph, kind, rediscover, listed: HashSet::new(), first_list: true };
        tokio::spawn(async move {
            stop.run_until_cancelled(metadata_watch::watch_metadata(&client, &path, &mut watch)).await;
        });
    }
}

/// Passes the events of one kind to the graph.
struct KindWatch {
    graph: Arc<OwnershipGraph>,
    kind: Arc<ResourceKind>,
    rediscover: Arc<Notify>,
    /// Uids that the list in progress has shown so far.
    listed: HashSet<Uid>,
    first_list: bool,
}

impl KindWatch {
    fn finish_first_list(&mut self) {
        if std::mem::take(&mut self.first_list) {
            self.graph.kind_was_listed();
        }
    }

    fn rediscover_if_definition(&self) {
        if self.kind.resource.kind == "CustomResourceDefinition" {
            self.rediscover.notify_one();
        }
    }
}

impl Drop for KindWatch {
    /// A kind whose watch ends before its first list must not block `synced`.
    fn drop(&mut self) {
        self.finish_first_list();
    }
}

impl MetadataHandler for KindWatch {
    fn list_started(&mut self) {
        self.listed.clear();
    }

    fn listed(&mut self, object: PartialObjectMetadata<'_>) {
        let uid = self.graph.insert(&self.kind, &object);
        // Changes of its owners and dependents may have been missed while there was no watch.
        if !object.owners().is_empty() || object.is_deleting() {
            self.graph.queue_object(uid.clone());
        }
        self.listed.insert(uid);
    }

    fn list_completed(&mut self) {
        self.graph.retain_listed(&self.kind, &std::mem::take(&mut self.listed));
        self.finish_first_list();
        // A definition may have been created between discovery and this list.
        self.rediscover_if_definition();
    }

    fn applied(&mut self, object: PartialObjectMetadata<'_>) {
        self.graph.insert(&self.kind, &object);
        self.rediscover_if_definition();
    }

    fn deleted(&mut self, object: PartialObjectMetadata<'_>) {
        self.graph.remove(&Uid::parse(object.uid.as_deref().unwrap_or_default()));
        self.rediscover_if_definition();
    }
}

impl Collector {
    /// Returns the state of each owner of the object, by uid. An owner that the graph does not contain is read live,
    /// because only that proves its absence.
    pub(super) async fn owners(&self, object: &GraphObject) -> Result<Vec<(String, OwnerState)>, CollectError> {
        let mut owners = Vec::new();
        for reference in &object.owners {
            let cached = self.graph.get(&Uid::parse(&reference.uid)).map(|owner| owner.owner_state(object));
            let state = match cached {
                Some(state) => state,
                None => self.live_owner(object, reference).await?,
            };
            owners.push((reference.uid.clone(), state));
        }
        Ok(owners)
    }

    async fn live_owner(&self, object: &GraphObject, reference: &OwnerReference) -> Result<OwnerState, CollectError> {
        let group = reference.api_version.rsplit_once('/').map_or("", |(group, _)| group);
        let kinds = self.graph.kinds();
        let kind = kinds.iter().find(|k| k.resource.kind == reference.kind && k.resource.group == group);
        let Some(kind) = kind else {
            return Err(CollectError::UnknownOwner(format!("{} {}", reference.kind, reference.name)));
        };
        let namespace = object.key.namespace.as_deref();
        // A cluster-scoped object cannot have a namespaced owner.
        if kind.namespaced && namespace.is_none() {
            return Ok(OwnerState::Absent);
        }
        let owner = kind.api(self.context.client.kube(), namespace).get_metadata_opt(&reference.name).await;
        let owner = owner.map_err(request_failed("get owner", &reference.name))?;
        match owner.filter(|o| o.metadata.uid() == reference.uid) {
            Some(_) => Ok(OwnerState::Exists),
            None => Ok(OwnerState::Absent),
        }
    }

    /// Reads the namespace live and, if it is being deleted, the metadata of every object in it. Returns `None` if the
    /// namespace does not exist.
    pub(super) async fn live_namespace(&self, name: &str) -> Result<Option<NamespaceSnapshot>, CollectError> {
        let namespace = self.namespaces().get_opt(name).await.map_err(request_failed("get namespace", name))?;
        let Some(namespace) = namespace else { return Ok(None) };
        let mut snapshot = NamespaceSnapshot {
            deleting: namespace.metadata.is_deleting(),
            finalizers: namespace.spec.and_then(|s| s.finalizers).unwrap_or_default(),
            content: Vec::new(),
        };
        if !snapshot.deleting {
            return Ok(Some(snapshot));
        }
        for kind in self.graph.kinds().into_iter().filter(|k| k.namespaced) {
            let api = kind.api(self.context.client.kube(), Some(name));
            let listed = match api.list_metadata(&ListParams::default()).await {
                Ok(listed) => listed,
                // The kind was removed after discovery, and its objects with it.
                Err(error) if status_code(&error) == Some(404) => continue,
                Err(error) => return Err(request_failed("list", kind.name())(error)),
            };
            snapshot.content.extend(listed.items.into_iter().map(|object| NamespacedObject {
                kind: kind.name(),
                deleting: object.metadata.is_deleting(),
                finalizers: object.metadata.finalizers.unwrap_or_default(),
            }));
        }
        Ok(Some(snapshot))
    }
}
