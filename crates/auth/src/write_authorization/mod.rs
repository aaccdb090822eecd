//! Rules about what a caller may write into objects that it may write: a caller grants no rights that it does not hold
//! itself (`escalation`), and a node writes only its own objects and those of the pods assigned to it
//! (`node_restriction`).
//!
//! Each public function takes the [`Actor`] of the write. It checks clients; it does not check the server itself.

mod escalation;
mod node_restriction;

use crate::actor::Actor;
use crate::authenticate::Caller;
use crate::authorize::{Attributes, Authorizer, RequestTarget};
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::{Kind, Object, typed};
use cleat_apimachinery::managed_fields::decode;
use cleat_apimachinery::part::ObjectPart;
use cleat_registry::strategy::rbac::GROUP;
use cleat_store::Store;
use escalation::check_escalation;
use node_restriction::{check_node_create, check_node_update, is_assigned_to};

/// Fails with a 403 if the actor may not create this object.
pub async fn check_create(
    authorizer: &Authorizer,
    actor: &Actor,
    kind: &dyn Kind,
    object: &dyn Object,
) -> Result<(), ApiError> {
    let Actor::Client { caller, verb } = actor else { return Ok(()) };
    let d = kind.descriptor();
    check_create_verb(authorizer, caller, verb, d, object).await?;
    if d.group == GROUP {
        return check_escalation(authorizer, caller, d, object, None).await;
    }
    match caller.node_name() {
        Some(node) => check_node_create(d, node, object),
        None => Ok(()),
    }
}

/// Fails with a 403 if the actor may not replace `old` by `new`.
pub async fn check_update(
    authorizer: &Authorizer,
    actor: &Actor,
    at: &ObjectAddress<'_>,
    part: ObjectPart,
    new: &dyn Object,
    old: &dyn Object,
) -> Result<(), ApiError> {
    let Some(caller) = actor.caller() else { return Ok(()) };
    let d = at.descriptor();
    if d.group == GROUP && part == ObjectPart::Main {
        return check_escalation(authorizer, caller, d, new, Some(old)).await;
    }
    match caller.node_name() {
        Some(node) => check_node_update(d, node, part, new, old),
        None => Ok(()),
    }
}

/// Fails with a 403 if the actor may not delete this object. Succeeds if the object does not exist.
pub async fn check_delete(store: &dyn Store, actor: &Actor, at: ObjectAddress<'_>) -> Result<(), ApiError> {
    let Some(caller) = actor.caller() else { return Ok(()) };
    let (Some(node), "pods", "") =
        (caller.node_name(), at.descriptor().plural.as_str(), at.descriptor().group.as_str())
    else {
        return Ok(());
    };
    let Some(entry) = store.get(&at.key()).await? else { return Ok(()) };
    let pod = decode(at.kind, &entry)?;
    if is_assigned_to(typed(&*pod), node) {
        return Ok(());
    }
    let why = format!("node {node:?} can only delete pods with spec.nodeName set to itself");
    Err(ApiError::forbidden(at.descriptor(), at.name, why))
}

/// A PUT or PATCH of an object that does not exist creates it, and needs the verb `create` besides the one that the
/// request was authorized for.
async fn check_create_verb(
    authorizer: &Authorizer,
    caller: &Caller,
    verb: &str,
    d: &Descriptor,
    object: &dyn Object,
) -> Result<(), ApiError> {
    if !matches!(verb, "update" | "patch") {
        return Ok(());
    }
    let meta = object.meta();
    let target = RequestTarget::Resource {
        group: &d.group,
        plural: &d.plural,
        subresource: "",
        namespace: meta.namespace.as_deref(),
        name: meta.name.as_deref().unwrap_or_default(),
    };
    authorizer.require(caller, &Attributes::new("create", target)).await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cleat_registry::catalog::KindCatalog;
    use cleat_registry::reader::ObjectReader;
    use cleat_store::EmbeddedStore;
    use k8s_openapi::api::core::v1::Node;
    use k8s_openapi::api::rbac::v1::ClusterRole;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use serde_json::json;

    use super::*;
    use crate::authorize::rules::full_access;

    fn named<T: Default>(name: &str, meta: impl Fn(&mut T) -> &mut ObjectMeta) -> T {
        let mut object = T::default();
        meta(&mut object).name = Some(name.into());
        object
    }

    #[tokio::test]
    async fn clients_are_checked_and_the_server_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&dir.path().join("store.redb"), Default::default()).unwrap();
        let store: Arc<dyn Store> = Arc::new(store);
        let catalog = Arc::new(KindCatalog::builtin());
        let authorizer = Authorizer::new(ObjectReader::new(store.clone(), catalog.clone()));
        let kinds = catalog.kinds();
        let nodes = &**kinds.find("", "v1", "nodes").unwrap();
        let roles = &**kinds.find(GROUP, "v1", "clusterroles").unwrap();
        let pods = &**kinds.find("", "v1", "pods").unwrap();

        let node: Node = named("two", |node: &mut Node| &mut node.metadata);
        let at_node = ObjectAddress { kind: nodes, namespace: None, name: "two" };
        let mut role: ClusterRole = named("all", |role: &mut ClusterRole| &mut role.metadata);
        role.rules = Some(full_access());
        let at_pod = ObjectAddress { kind: pods, namespace: Some("default"), name: "p" };
        let pod = json!({ "metadata": { "name": "p", "namespace": "default" },
            "spec": { "nodeName": "two", "containers": [] } });
        store.create(&at_pod.key(), pod.to_string().into()).await.unwrap();

        let client = |user| Actor::Client { caller: Arc::new(Caller::component(user)), verb: "create" };
        for (case, actor, may_write_node, may_grant) in [
            ("the server", Actor::Server, true, true),
            ("the node itself", client("system:node:two"), true, false),
            ("another node", client("system:node:one"), false, false),
        ] {
            let forbidden = |result: Result<(), ApiError>| match result {
                Ok(()) => false,
                Err(ApiError::Forbidden { .. }) => true,
                Err(error) => panic!("{case}: {error}"),
            };
            let created = check_create(&authorizer, &actor, nodes, &node).await;
            assert_eq!(forbidden(created), !may_write_node, "{case} creates the node");
            let updated = check_update(&authorizer, &actor, &at_node, ObjectPart::Main, &node, &node).await;
            assert_eq!(forbidden(updated), !may_write_node, "{case} updates the node");
            let deleted = check_delete(&*store, &actor, at_pod).await;
            assert_eq!(forbidden(deleted), !may_write_node, "{case} deletes a pod of the node");
            let granted = check_create(&authorizer, &actor, roles, &role).await;
            assert_eq!(forbidden(granted), !may_grant, "{case} creates a role with full access");
        }
    }

    #[tokio::test]
    async fn an_update_that_creates_needs_the_verb_create() {
        let dir = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&dir.path().join("store.redb"), Default::default()).unwrap();
        let catalog = Arc::new(KindCatalog::builtin());
        let authorizer = Authorizer::new(ObjectReader::new(Arc::new(store), catalog.clone()));
        let kinds = catalog.kinds();
        let nodes = &**kinds.find("", "v1", "nodes").unwrap();
        let node: Node = named("n", |node: &mut Node| &mut node.metadata);
        for (verb, want) in [("create", true), ("update", false), ("patch", false)] {
            // No role grants this user anything. The request itself was authorized before, for `verb`.
            let actor = Actor::Client { caller: Arc::new(Caller::component("user")), verb };
            assert_eq!(check_create(&authorizer, &actor, nodes, &node).await.is_ok(), want, "{verb}");
        }
    }
}
