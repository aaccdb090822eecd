//! The controller of the ServiceAccount `default`: creates it in every new namespace, and again after it was deleted.

use std::sync::Arc;

use cleat_store::{Range, WatchError};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};

use crate::endpoint::write::insert;
use crate::http::query::WriteMode;
use crate::state::ServerState;
use crate::watch_loop::run_until_closed;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::managed_fields::ManagedObject;
use cleat_auth::actor::Actor;

const NAMESPACES: &str = "/registry/namespaces/";
const SERVICE_ACCOUNTS: &str = "/registry/serviceaccounts/";
const DEFAULT_ACCOUNT: &str = "default";

/// Runs until the server closes.
pub(crate) async fn run(api: Arc<ServerState>) {
    run_until_closed(api, "default service accounts", |api| Box::pin(watch(api))).await;
}

/// Creates the accounts that are missing, then those that changes of the store require. Ends only with an error.
async fn watch(api: &ServerState) -> Result<(), WatchError> {
    let Ok(snapshot) = api.store.list(Range { prefix: NAMESPACES, ..Range::default() }).await else {
        return Err(WatchError::Closed);
    };
    let mut namespaces = api.store.watch(NAMESPACES, snapshot.revision).await?;
    let mut accounts = api.store.watch(SERVICE_ACCOUNTS, snapshot.revision).await?;
    for entry in snapshot.entries() {
        ensure_account(api, entry.key.trim_start_matches(NAMESPACES)).await;
    }
    loop {
        let (event, prefix) = tokio::select! {
            event = namespaces.next() => (event?, NAMESPACES),
            event = accounts.next() => (event?, SERVICE_ACCOUNTS),
        };
        let name = event.key().trim_start_matches(prefix);
        match prefix {
            NAMESPACES if event.old.is_none() => ensure_account(api, name).await,
            SERVICE_ACCOUNTS if event.new.is_none() => {
                if let Some(namespace) = name.strip_suffix("/default") {
                    ensure_account(api, namespace).await;
                }
            }
            _ => {}
        }
    }
}

/// Creates the account if it does not exist and the namespace is not being deleted.
async fn ensure_account(api: &ServerState, namespace: &str) {
    let found = api.store.get(&format!("{NAMESPACES}{namespace}")).await.ok().flatten();
    let is_active = found
        .and_then(|entry| serde_json::from_slice::<Namespace>(&entry.value).ok())
        .is_some_and(|n| n.metadata.deletion_timestamp.is_none());
    if !is_active {
        return;
    }
    let kinds = api.kinds();
    let Some(kind) = kinds.find("", "v1", "serviceaccounts") else { return };
    let mut account = ServiceAccount::default();
    account.metadata.name = Some(DEFAULT_ACCOUNT.into());
    let document = ManagedObject::without_owners(Box::new(account));
    match insert(api, &Actor::Server, &**kind, Some(namespace), document, WriteMode::Persist).await {
        // Forbidden and not found: the deletion of the namespace has begun, or ended, in the meantime.
        Ok(_) | Err(ApiError::AlreadyExists { .. } | ApiError::Forbidden { .. } | ApiError::NotFound { .. }) => {}
        Err(error) => tracing::error!(%error, namespace, "cannot create the default service account"),
    }
}
