//! The controller of CustomResourceDefinitions: checks their names for conflicts, serves their resources, writes their
//! status, and deletes their objects when they are deleted.
//!
//! A resource is served before the condition Established is written, so that a client that waits for the condition
//! can use the resource. All state is derived from the stored definitions: after a crash between two steps the next
//! start repeats them.

use std::collections::HashMap;
use std::sync::Arc;

use cleat_store::{Range, WatchError};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionCondition as Condition,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, Time};

use crate::endpoint::delete::{DeleteOutcome, remove};
use crate::endpoint::write::{UpdateSource, modify};
use crate::http::query::WriteMode;
use crate::state::ServerState;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::{Kind, typed_mut};
use cleat_apimachinery::managed_fields::CurrentObject;
use cleat_apimachinery::meta;
use cleat_apimachinery::part::ObjectPart;
use cleat_auth::actor::Actor;
use cleat_registry::custom::name_conflicts::{NameAcceptance, accept_names};
use cleat_registry::custom::{CLEANUP_FINALIZER, build_kinds};

const DEFINITIONS: &str = "/registry/customresourcedefinitions/";

/// The version of a definition that is served.
#[derive(PartialEq)]
struct ServedVersion {
    uid: Option<String>,
    generation: Option<i64>,
    is_deleting: bool,
}

/// By the definition's name.
type ServedVersions = HashMap<String, ServedVersion>;

/// Serves the established definitions. The server calls it once, before it serves requests.
pub(crate) async fn load(api: &ServerState) {
    for definition in list_definitions(api).await {
        if has_condition(&definition, "Established") {
            api.catalog.set_custom_kinds(&name(&definition), build_kinds(&definition));
        }
    }
}

/// Runs until the server closes.
pub(crate) async fn run(api: Arc<ServerState>) {
    let closing = api.closing.clone();
    let watching = async {
        let mut served = ServedVersions::new();
        loop {
            match watch(&api, &mut served).await {
                Err(WatchError::Closed) => return,
                Ok(()) => {}
                Err(error) => tracing::warn!(%error, controller = "definitions", "watch failed, listing again"),
            }
        }
    };
    closing.run_until_cancelled(watching).await;
}

/// Reconciles all definitions, then those that change. Ends only with an error.
async fn watch(api: &Arc<ServerState>, served: &mut ServedVersions) -> Result<(), WatchError> {
    let Ok(snapshot) = api.store.list(Range { prefix: DEFINITIONS, ..Range::default() }).await else {
        return Err(WatchError::Closed);
    };
    let mut changes = api.store.watch(DEFINITIONS, snapshot.revision).await?;
    for definition in list_definitions(api).await {
        reconcile(api, definition, served).await;
    }
    loop {
        let event = changes.next().await?;
        match &event.new {
            Some(entry) => {
                if let Ok(definition) = serde_json::from_slice(&entry.value) {
                    reconcile(api, definition, served).await;
                }
            }
            None => {
                let name = event.key().trim_start_matches(DEFINITIONS);
                served.remove(name);
                api.catalog.set_custom_kinds(name, Vec::new());
                // Another definition may have been refused because of these names.
                for definition in list_definitions(api).await {
                    reconcile(api, definition, served).await;
                }
            }
        }
    }
}

/// All definitions. Empty if the store fails.
async fn list_definitions(api: &ServerState) -> Vec<CustomResourceDefinition> {
    let Ok(snapshot) = api.store.list(Range { prefix: DEFINITIONS, ..Range::default() }).await else {
        return Vec::new();
    };
    snapshot.entries().filter_map(|entry| serde_json::from_slice(&entry.value).ok()).collect()
}

fn name(definition: &CustomResourceDefinition) -> String {
    definition.metadata.name.clone().unwrap_or_default()
}

/// Does the definition have this condition with the status True?
fn has_condition(definition: &CustomResourceDefinition, condition: &str) -> bool {
    let conditions = definition.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions.is_some_and(|c| c.iter().any(|c| c.type_ == condition && c.status == "True"))
}

async fn reconcile(api: &Arc<ServerState>, definition: CustomResourceDefinition, served: &mut ServedVersions) {
    let name = name(&definition);
    let is_deleting = definition.metadata.deletion_timestamp.is_some();
    let verdict = accept_names(&definition, &list_definitions(api).await);
    let is_established = has_condition(&definition, "Established") || verdict.conflict.is_none();
    let version =
        ServedVersion { uid: definition.metadata.uid.clone(), generation: definition.metadata.generation, is_deleting };
    let is_new_version = served.get(&name) != Some(&version);
    if is_established && is_new_version {
        api.catalog.set_custom_kinds(&name, build_kinds(&definition));
        served.insert(name.clone(), version);
    }
    let written = match is_deleting {
        false => write_names_status(api, &name, &verdict).await,
        true if is_new_version => {
            let api = api.clone();
            tokio::spawn(async move {
                let closing = api.closing.clone();
                if let Some(Err(error)) = closing.run_until_cancelled(finalize(&api, &definition)).await {
                    tracing::error!(%error, "cannot delete the objects of a definition that is being deleted");
                }
            });
            Ok(())
        }
        true => Ok(()),
    };
    if let Err(error) = written {
        tracing::error!(%error, definition = name, "cannot write the status of a definition");
    }
}

/// Writes the accepted names and the conditions NamesAccepted and Established.
async fn write_names_status(api: &ServerState, name: &str, verdict: &NameAcceptance) -> Result<(), ApiError> {
    update(api, name, |definition| {
        let status = definition.status.get_or_insert_default();
        status.accepted_names = Some(verdict.accepted.clone());
        let conditions = status.conditions.get_or_insert_default();
        match &verdict.conflict {
            None => {
                set_condition(conditions, "NamesAccepted", true, "NoConflicts", "no conflicts found");
                set_condition(
                    conditions,
                    "Established",
                    true,
                    "InitialNamesAccepted",
                    "the initial names have been accepted",
                );
            }
            Some((reason, message)) => {
                set_condition(conditions, "NamesAccepted", false, reason, message);
                if !conditions.iter().any(|c| c.type_ == "Established") {
                    set_condition(conditions, "Established", false, "NotAccepted", "not all names are accepted");
                }
            }
        }
    })
    .await
}

/// Sets a condition. The transition time changes only if the status does.
fn set_condition(conditions: &mut Vec<Condition>, type_: &str, is_true: bool, reason: &str, message: &str) {
    let status = if is_true { "True" } else { "False" };
    let existing = conditions.iter_mut().find(|c| c.type_ == type_);
    let unchanged_since = existing.as_ref().filter(|c| c.status == status).and_then(|c| c.last_transition_time.clone());
    let condition = Condition {
        type_: type_.into(),
        status: status.into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_transition_time: Some(unchanged_since.unwrap_or_else(|| Time(meta::now()))),
        observed_generation: None,
    };
    match existing {
        Some(existing) => *existing = condition,
        None => conditions.push(condition),
    }
}

/// Updates the stored definition. Succeeds if it does not exist.
async fn update(
    api: &ServerState,
    name: &str,
    edit: impl Fn(&mut CustomResourceDefinition) + Send + Sync,
) -> Result<(), ApiError> {
    let kinds = api.kinds();
    let Some(kind) = kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions") else { return Ok(()) };
    let at = ObjectAddress { kind: &**kind, namespace: None, name };
    let mut change = |current: &CurrentObject<'_>| Ok(current.edited(|new| edit(typed_mut(new))));
    match modify(api, &Actor::Server, at, ObjectPart::Whole, UpdateSource::Server, WriteMode::Persist, &mut change)
        .await
    {
        Ok(_) | Err(ApiError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Deletes the objects of a definition that is being deleted, waits for those with finalizers, and removes the
/// definition's own finalizer.
async fn finalize(api: &ServerState, definition: &CustomResourceDefinition) -> Result<(), ApiError> {
    let name = name(definition);
    let terminating = |reason: &'static str, message: &'static str, is_true: bool| {
        move |definition: &mut CustomResourceDefinition| {
            let conditions = definition.status.get_or_insert_default().conditions.get_or_insert_default();
            set_condition(conditions, "Terminating", is_true, reason, message);
        }
    };
    let in_progress = ("InstanceDeletionInProgress", "CustomResource deletion is in progress");
    update(api, &name, terminating(in_progress.0, in_progress.1, true)).await?;
    if let Some(kind) = build_kinds(definition).first() {
        delete_objects(api, &**kind).await?;
    }
    update(api, &name, terminating("InstanceDeletionCompleted", "removed all instances", false)).await?;
    update(api, &name, |definition| {
        definition.metadata.finalizers.iter_mut().for_each(|f| f.retain(|f| f != CLEANUP_FINALIZER));
        definition.metadata.finalizers.take_if(|f| f.is_empty());
    })
    .await
}

/// Returns when no object of the kind is left, or the store closes.
async fn delete_objects(api: &ServerState, kind: &dyn Kind) -> Result<(), ApiError> {
    let d = kind.descriptor();
    let prefix = d.prefix(None);
    loop {
        let snapshot = api.store.list(Range { prefix: &prefix, ..Range::default() }).await?;
        let mut remaining = 0;
        for entry in snapshot.entries() {
            let mut path = entry.key.rsplit('/');
            let name = path.next().unwrap_or_default();
            let namespace = path.next().filter(|_| d.namespaced);
            let at = ObjectAddress { kind, namespace, name };
            match remove(api, &Actor::Server, at, &DeleteOptions::default(), WriteMode::Persist).await {
                Ok(DeleteOutcome::Pending(_)) => remaining += 1,
                Ok(DeleteOutcome::Removed(_)) | Err(ApiError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        if remaining == 0 {
            return Ok(());
        }
        // The remaining objects have finalizers. Wait until one of them is removed from the store.
        let removed = async {
            let mut changes = api.store.watch(&prefix, snapshot.revision).await?;
            while changes.next().await?.new.is_some() {}
            Ok::<_, WatchError>(())
        };
        match removed.await {
            Ok(()) | Err(WatchError::TooOld { .. } | WatchError::Future { .. }) => {}
            Err(WatchError::Closed) => return Ok(()),
            Err(WatchError::Read(error)) => return Err(error.into()),
        }
    }
}
