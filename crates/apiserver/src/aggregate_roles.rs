//! Keeps the rules of aggregated ClusterRoles: they are those of the roles their selectors match.

use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::managed_fields::Current;
use cleat_apimachinery::part::ObjectPart;
use cleat_auth::actor::Actor;
use std::sync::Arc;

use cleat_store::{Range, WatchError};
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use crate::endpoint::write::{UpdateSource, modify};
use crate::http::query::WriteMode;
use crate::state::ServerState;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::typed_mut;
use cleat_registry::strategy::rbac::GROUP;

const CLUSTER_ROLES: &str = "/registry/clusterroles/";

/// Follows the roles until the server goes away.
pub(crate) async fn run(api: Arc<ServerState>) {
    crate::follow::follow(api, "aggregated roles", |api| Box::pin(follow(api))).await;
}

async fn follow(api: &ServerState) -> Result<(), WatchError> {
    let revision = api.store.revision().await?;
    let mut watch = api.store.watch(CLUSTER_ROLES, revision).await?;
    loop {
        // Roles collect roles that collect roles: each write here is a change that brings us here again.
        if let Err(error) = collect(api).await {
            tracing::error!(%error, "aggregated roles are not up to date");
        }
        watch.next().await?;
    }
}

/// Repeats `collect` until nothing changes: roles collect roles that collect roles.
pub(crate) async fn collect_all(api: &ServerState) -> Result<(), ApiError> {
    const DEPTH: usize = 8;
    for _ in 0..DEPTH {
        let before = api.store.revision().await?;
        collect(api).await?;
        if api.store.revision().await? == before {
            break;
        }
    }
    Ok(())
}

/// Writes the rules of every aggregated role whose rules are not what they should be.
async fn collect(api: &ServerState) -> Result<(), ApiError> {
    let snapshot = api.store.list(Range { prefix: CLUSTER_ROLES, ..Range::default() }).await?;
    let roles: Vec<ClusterRole> = snapshot.entries().filter_map(|e| serde_json::from_slice(&e.value).ok()).collect();
    let kinds = api.kinds();
    let Some(kind) = kinds.find(GROUP, "v1", "clusterroles") else { return Ok(()) };
    for role in &roles {
        let Some(wanted) = collected(role, &roles) else { continue };
        if role.rules.as_deref().unwrap_or_default() == wanted {
            continue;
        }
        let at =
            ObjectAddress { kind: &**kind, namespace: None, name: role.metadata.name.as_deref().unwrap_or_default() };
        let mut change = |current: &Current<'_>| {
            Ok(current.edited(|new| typed_mut::<ClusterRole>(new).rules = Some(wanted.clone())))
        };
        match modify(api, &Actor::Server, at, ObjectPart::Whole, UpdateSource::Server, WriteMode::Persist, &mut change)
            .await
        {
            Ok(_) | Err(ApiError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The rules an aggregated role should have; nothing for a plain one.
fn collected(role: &ClusterRole, all: &[ClusterRole]) -> Option<Vec<PolicyRule>> {
    let selectors = role.aggregation_rule.as_ref()?.cluster_role_selectors.as_deref().unwrap_or_default();
    let mut rules: Vec<PolicyRule> = Vec::new();
    for other in all.iter().filter(|other| other.metadata.name != role.metadata.name) {
        if !selectors.iter().any(|selector| matches(selector, other)) {
            continue;
        }
        for rule in other.rules.iter().flatten() {
            if !rules.contains(rule) {
                rules.push(rule.clone());
            }
        }
    }
    Some(rules)
}

fn matches(selector: &LabelSelector, role: &ClusterRole) -> bool {
    let label = |key: &str| role.metadata.labels.as_ref().and_then(|l| l.get(key));
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| label(key) == Some(value));
    let expressed = selector.match_expressions.iter().flatten().all(|e| {
        let listed = |value: &String| e.values.iter().flatten().any(|v| v == value);
        match e.operator.as_str() {
            "In" => label(&e.key).is_some_and(listed),
            "NotIn" => !label(&e.key).is_some_and(listed),
            "Exists" => label(&e.key).is_some(),
            "DoesNotExist" => label(&e.key).is_none(),
            _ => false,
        }
    });
    equal && expressed
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn role(value: Value) -> ClusterRole {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_role_collects_those_its_selectors_match() {
        let rule = |verb: &str| json!({ "apiGroups": [""], "resources": ["pods"], "verbs": [verb] });
        let all = [
            role(json!({
                "metadata": { "name": "sum" },
                "aggregationRule": { "clusterRoleSelectors": [{ "matchLabels": { "sum": "yes" } }] },
                "rules": [rule("stale")],
            })),
            role(
                json!({ "metadata": { "name": "a", "labels": { "sum": "yes" } }, "rules": [rule("get"), rule("get")] }),
            ),
            role(json!({ "metadata": { "name": "b", "labels": { "sum": "yes" } }, "rules": [rule("list")] })),
            role(json!({ "metadata": { "name": "c", "labels": { "sum": "no" } }, "rules": [rule("delete")] })),
        ];
        let verbs: Vec<_> = collected(&all[0], &all).unwrap().into_iter().flat_map(|r| r.verbs).collect();
        assert_eq!(verbs, ["get", "list"]);
        assert!(collected(&all[1], &all).is_none());
    }
}
