//! The end of a namespace: when one is deleted, everything in it is deleted, and once it is empty it goes.

use std::sync::Arc;

use cleat_store::{Range, WatchError};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::DeleteOptions;

use crate::api::Api;
use crate::endpoint::At;
use crate::endpoint::delete::{Outcome, remove};
use crate::endpoint::write::{Origin, Part, modify};
use crate::error::ApiError;
use crate::http::query::Effect;
use crate::kind::{Object, typed_mut};
use crate::render::Stored;
use crate::strategy::NAMESPACE_FINALIZER;

const NAMESPACES: &str = "/registry/namespaces/";
const EVERYTHING: &str = "/registry/";

/// Follows the namespaces until the server goes away.
pub(crate) async fn run(api: Arc<Api>) {
    let closing = api.closing.clone();
    closing.run_until_cancelled(follow(api)).await;
}

async fn follow(api: Arc<Api>) {
    loop {
        match follow_once(&api).await {
            Ok(()) | Err(WatchError::Closed) => return,
            Err(error) => tracing::warn!(%error, "namespace watch starts over"),
        }
    }
}

async fn follow_once(api: &Arc<Api>) -> Result<(), WatchError> {
    let Ok(snapshot) = api.store.list(Range { prefix: NAMESPACES, ..Range::default() }).await else { return Ok(()) };
    let mut watch = api.store.watch(NAMESPACES, snapshot.revision).await?;
    for entry in &snapshot.entries {
        consider(api, &entry.value);
    }
    loop {
        let event = watch.next().await?;
        // Only the change that begins the deletion starts the emptying.
        let began = |value: &[u8]| is_deleting(value).is_some();
        let before = event.old.as_ref().is_some_and(|old| began(&old.value));
        if let Some(new) = event.new.as_ref().filter(|_| !before) {
            consider(api, &new.value);
        }
    }
}

fn is_deleting(value: &[u8]) -> Option<String> {
    let namespace: Namespace = serde_json::from_slice(value).ok()?;
    namespace.metadata.deletion_timestamp.as_ref()?;
    namespace.metadata.name
}

fn consider(api: &Arc<Api>, value: &[u8]) {
    let Some(name) = is_deleting(value) else { return };
    let api = api.clone();
    tokio::spawn(async move {
        let closing = api.closing.clone();
        let outcome = closing.run_until_cancelled(empty(&api, &name)).await;
        if let Some(Err(error)) = outcome {
            tracing::error!(%error, namespace = name, "namespace cannot be emptied");
        }
    });
}

async fn empty(api: &Api, namespace: &str) -> Result<(), ApiError> {
    loop {
        let start = api.store.revision().await?;
        if delete_content(api, namespace).await? == 0 {
            break;
        }
        // What is left waits for a finalizer or a grace period; its end is a change like any other.
        let waited = async {
            let mut watch = api.store.watch(EVERYTHING, start).await?;
            loop {
                let event = watch.next().await?;
                if event.new.is_none() && event.key().split('/').nth(3) == Some(namespace) {
                    return Ok::<_, WatchError>(());
                }
            }
        };
        match waited.await {
            Ok(()) | Err(WatchError::TooOld { .. } | WatchError::Future { .. }) => {}
            Err(WatchError::Closed) => return Ok(()),
            Err(WatchError::Read(error)) => return Err(error.into()),
        }
    }
    finalize(api, namespace).await?;
    // A create that was admitted just before the deletion may have landed after the last look.
    delete_content(api, namespace).await?;
    Ok(())
}

/// Deletes all that can be deleted; the number of objects that are still there.
async fn delete_content(api: &Api, namespace: &str) -> Result<usize, ApiError> {
    let options = DeleteOptions::default();
    let mut left = 0;
    let kinds = api.kinds();
    for kind in kinds.iter().filter(|k| k.descriptor().namespaced) {
        let prefix = kind.descriptor().prefix(Some(namespace));
        let found = api.store.list(Range { prefix: &prefix, ..Range::default() }).await?;
        for entry in &found.entries {
            let name = entry.key.rsplit('/').next().unwrap_or_default();
            let at = At { kind: &**kind, namespace: Some(namespace), name };
            match remove(api, at, &options, Effect::Write).await {
                Ok(Outcome::Waiting(_)) => left += 1,
                Ok(Outcome::Removed(_)) | Err(ApiError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(left)
}

async fn finalize(api: &Api, name: &str) -> Result<(), ApiError> {
    let kinds = api.kinds();
    let Some(kind) = kinds.find("", "v1", "namespaces") else { return Ok(()) };
    let at = At { kind: &**kind, namespace: None, name };
    let mut change = |current: &dyn Object, _: &Stored| {
        let mut new = current.copy();
        let namespace: &mut Namespace = typed_mut(&mut *new);
        if let Some(finalizers) = namespace.spec.get_or_insert_default().finalizers.as_mut() {
            finalizers.retain(|f| f != NAMESPACE_FINALIZER);
        }
        Ok(new)
    };
    match modify(api, at, Part::Whole, Origin::Server, Effect::Write, &mut change).await {
        Ok(_) | Err(ApiError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}
