//! Every namespace has a ServiceAccount `default`. It is made with the namespace and made again if it is deleted.

use cleat_auth::actor::Actor;
use std::sync::Arc;

use cleat_store::{Range, WatchError};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};

use crate::endpoint::write::insert;
use crate::http::query::WriteMode;
use crate::state::ServerState;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::managed_fields::Document;

const NAMESPACES: &str = "/registry/namespaces/";
const ACCOUNTS: &str = "/registry/serviceaccounts/";
const DEFAULT: &str = "default";

/// Follows the namespaces until the server goes away.
pub(crate) async fn run(api: Arc<ServerState>) {
    crate::follow::follow(api, "default accounts", |api| Box::pin(follow(api))).await;
}

async fn follow(api: &ServerState) -> Result<(), WatchError> {
    let Ok(snapshot) = api.store.list(Range { prefix: NAMESPACES, ..Range::default() }).await else {
        return Err(WatchError::Closed);
    };
    let mut namespaces = api.store.watch(NAMESPACES, snapshot.revision).await?;
    let mut accounts = api.store.watch(ACCOUNTS, snapshot.revision).await?;
    for entry in snapshot.entries() {
        ensure(api, entry.key.trim_start_matches(NAMESPACES)).await;
    }
    loop {
        let (event, prefix) = tokio::select! {
            event = namespaces.next() => (event?, NAMESPACES),
            event = accounts.next() => (event?, ACCOUNTS),
        };
        let name = event.key().trim_start_matches(prefix);
        match prefix {
            NAMESPACES if event.old.is_none() => ensure(api, name).await,
            ACCOUNTS if event.new.is_none() => {
                if let Some(namespace) = name.strip_suffix("/default") {
                    ensure(api, namespace).await;
                }
            }
            _ => {}
        }
    }
}

/// Makes the account, unless the namespace is on its way out.
async fn ensure(api: &ServerState, namespace: &str) {
    let found = api.store.get(&format!("{NAMESPACES}{namespace}")).await.ok().flatten();
    let living = found
        .and_then(|entry| serde_json::from_slice::<Namespace>(&entry.value).ok())
        .is_some_and(|n| n.metadata.deletion_timestamp.is_none());
    if !living {
        return;
    }
    let kinds = api.kinds();
    let Some(kind) = kinds.find("", "v1", "serviceaccounts") else { return };
    let mut account = ServiceAccount::default();
    account.metadata.name = Some(DEFAULT.into());
    match insert(
        api,
        &Actor::Server,
        &**kind,
        Some(namespace),
        Document::unowned(Box::new(account)),
        WriteMode::Persist,
    )
    .await
    {
        // Forbidden and not found: the namespace began to go, or went, meanwhile.
        Ok(_) | Err(ApiError::AlreadyExists { .. } | ApiError::Forbidden { .. } | ApiError::NotFound { .. }) => {}
        Err(error) => tracing::error!(%error, namespace, "the default account cannot be made"),
    }
}
