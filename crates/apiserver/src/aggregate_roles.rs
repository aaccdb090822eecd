//! The controller of aggregated ClusterRoles: writes into each the rules of the ClusterRoles that its selectors match.

use std::sync::Arc;

use cleat_api::selector::labels_match;
use cleat_store::{Range, WatchError};
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};

use crate::endpoint::write::{UpdateSource, modify};
use crate::http::query::WriteMode;
use crate::state::ServerState;
use crate::watch_loop::run_until_closed;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::typed_mut;
use cleat_apimachinery::managed_fields::CurrentObject;
use cleat_apimachinery::part::ObjectPart;
use cleat_auth::actor::Actor;
use cleat_registry::strategy::rbac::GROUP;

const CLUSTER_ROLES: &str = "/registry/clusterroles/";
/// Bounds the chain of roles that aggregate aggregated roles, for the start of the server.
const MAX_AGGREGATION_PASSES: usize = 8;

/// Runs until the server closes.
pub(crate) async fn run(api: Arc<ServerState>) {
    run_until_closed(api, "aggregated roles", |api| Box::pin(watch(api))).await;
}

/// Aggregates after every change of a ClusterRole. Ends only with an error.
async fn watch(api: &ServerState) -> Result<(), WatchError> {
    let revision = api.store.revision().await?;
    let mut changes = api.store.watch(CLUSTER_ROLES, revision).await?;
    loop {
        // A role may aggregate aggregated roles: a write of this pass is a change that starts the next one.
        if let Err(error) = aggregate(api).await {
            tracing::error!(%error, "cannot update the aggregated roles");
        }
        changes.next().await?;
    }
}

/// Aggregates until a pass changes nothing: a role may aggregate aggregated roles.
pub(crate) async fn aggregate_all(api: &ServerState) -> Result<(), ApiError> {
    for _ in 0..MAX_AGGREGATION_PASSES {
        let before = api.store.revision().await?;
        aggregate(api).await?;
        if api.store.revision().await? == before {
            break;
        }
    }
    Ok(())
}

/// One pass: writes every aggregated role whose rules differ from those of the roles that it selects.
async fn aggregate(api: &ServerState) -> Result<(), ApiError> {
    let snapshot = api.store.list(Range { prefix: CLUSTER_ROLES, ..Range::default() }).await?;
    let roles: Vec<ClusterRole> = snapshot.entries().filter_map(|e| serde_json::from_slice(&e.value).ok()).collect();
    let kinds = api.kinds();
    let Some(kind) = kinds.find(GROUP, "v1", "clusterroles") else { return Ok(()) };
    for role in &roles {
        let Some(wanted) = aggregated_rules(role, &roles) else { continue };
        if role.rules.as_deref().unwrap_or_default() == wanted {
            continue;
        }
        let at =
            ObjectAddress { kind: &**kind, namespace: None, name: role.metadata.name.as_deref().unwrap_or_default() };
        let mut change = |current: &CurrentObject<'_>| {
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

/// The rules that an aggregated role should have. `None` for a role without an aggregation rule.
fn aggregated_rules(role: &ClusterRole, all: &[ClusterRole]) -> Option<Vec<PolicyRule>> {
    let selectors = role.aggregation_rule.as_ref()?.cluster_role_selectors.as_deref().unwrap_or_default();
    let mut rules: Vec<PolicyRule> = Vec::new();
    for other in all.iter().filter(|other| other.metadata.name != role.metadata.name) {
        if !selectors.iter().any(|selector| labels_match(selector, other.metadata.labels.as_ref())) {
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn role(value: Value) -> ClusterRole {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_role_aggregates_those_that_its_selectors_match() {
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
        let verbs: Vec<_> = aggregated_rules(&all[0], &all).unwrap().into_iter().flat_map(|r| r.verbs).collect();
        assert_eq!(verbs, ["get", "list"]);
        assert!(aggregated_rules(&all[1], &all).is_none());
    }
}
