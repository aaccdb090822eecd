//! Keeps what is served in step with the definitions that are stored: judges their names, serves them, says so in their
//! status, and empties them when they are deleted.
//!
//! A definition is served before its status says Established, so whoever waits for that finds it. Everything here
//! starts over from what is stored: a crash between two steps is repaired by the next start.

use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::managed_fields::Current;
use cleat_apimachinery::part::ObjectPart;
use cleat_auth::actor::Actor;
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
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::{Kind, typed_mut};
use cleat_apimachinery::meta;
use cleat_registry::custom::names::{Verdict, judge};
use cleat_registry::custom::{CLEANUP, kinds};

const DEFINITIONS: &str = "/registry/customresourcedefinitions/";

/// Which form of each definition is served: its uid, its generation, and whether it is going away.
type Served = HashMap<String, (Option<String>, Option<i64>, bool)>;

/// Serves all that is established already; for the start, before anybody asks.
pub(crate) async fn load(api: &ServerState) {
    for definition in all(api).await {
        if is_true(&definition, "Established") {
            api.catalog.define(&name(&definition), kinds(&definition));
        }
    }
}

/// Follows the definitions until the server goes away.
pub(crate) async fn run(api: Arc<ServerState>) {
    let closing = api.closing.clone();
    let follow = async {
        let mut served = Served::new();
        loop {
            match follow(&api, &mut served).await {
                Err(WatchError::Closed) => return,
                Ok(()) => {}
                Err(error) => tracing::warn!(%error, "the watch for definitions starts over"),
            }
        }
    };
    closing.run_until_cancelled(follow).await;
}

async fn follow(api: &Arc<ServerState>, served: &mut Served) -> Result<(), WatchError> {
    let Ok(snapshot) = api.store.list(Range { prefix: DEFINITIONS, ..Range::default() }).await else {
        return Err(WatchError::Closed);
    };
    let mut watch = api.store.watch(DEFINITIONS, snapshot.revision).await?;
    for definition in all(api).await {
        settle(api, definition, served).await;
    }
    loop {
        let event = watch.next().await?;
        match &event.new {
            Some(entry) => {
                if let Ok(definition) = serde_json::from_slice(&entry.value) {
                    settle(api, definition, served).await;
                }
            }
            None => {
                let gone = event.key().trim_start_matches(DEFINITIONS);
                served.remove(gone);
                api.catalog.define(gone, Vec::new());
                // Somebody else may have been waiting for its names.
                for definition in all(api).await {
                    settle(api, definition, served).await;
                }
            }
        }
    }
}

async fn all(api: &ServerState) -> Vec<CustomResourceDefinition> {
    let Ok(snapshot) = api.store.list(Range { prefix: DEFINITIONS, ..Range::default() }).await else {
        return Vec::new();
    };
    snapshot.entries().filter_map(|entry| serde_json::from_slice(&entry.value).ok()).collect()
}

fn name(definition: &CustomResourceDefinition) -> String {
    definition.metadata.name.clone().unwrap_or_default()
}

fn is_true(definition: &CustomResourceDefinition, condition: &str) -> bool {
    let conditions = definition.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions.is_some_and(|c| c.iter().any(|c| c.type_ == condition && c.status == "True"))
}

async fn settle(api: &Arc<ServerState>, definition: CustomResourceDefinition, served: &mut Served) {
    let name = name(&definition);
    let deleting = definition.metadata.deletion_timestamp.is_some();
    let verdict = judge(&definition, &all(api).await);
    let established = is_true(&definition, "Established") || verdict.conflict.is_none();
    let form = (definition.metadata.uid.clone(), definition.metadata.generation, deleting);
    let first = served.get(&name) != Some(&form);
    if established && first {
        api.catalog.define(&name, kinds(&definition));
        served.insert(name.clone(), form);
    }
    let written = match deleting {
        false => accept(api, &name, &verdict).await,
        true if first => {
            let api = api.clone();
            tokio::spawn(async move {
                let closing = api.closing.clone();
                if let Some(Err(error)) = closing.run_until_cancelled(empty(&api, &definition)).await {
                    tracing::error!(%error, "a definition that is being deleted cannot be emptied");
                }
            });
            Ok(())
        }
        true => Ok(()),
    };
    if let Err(error) = written {
        tracing::error!(%error, definition = name, "the status of a definition cannot be written");
    }
}

/// Tells in the status what became of the names.
async fn accept(api: &ServerState, name: &str, verdict: &Verdict) -> Result<(), ApiError> {
    change(api, name, |definition| {
        let status = definition.status.get_or_insert_default();
        status.accepted_names = Some(verdict.accepted.clone());
        let conditions = status.conditions.get_or_insert_default();
        match &verdict.conflict {
            None => {
                set(conditions, "NamesAccepted", true, "NoConflicts", "no conflicts found");
                set(conditions, "Established", true, "InitialNamesAccepted", "the initial names have been accepted");
            }
            Some((reason, message)) => {
                set(conditions, "NamesAccepted", false, reason, message);
                if !conditions.iter().any(|c| c.type_ == "Established") {
                    set(conditions, "Established", false, "NotAccepted", "not all names are accepted");
                }
            }
        }
    })
    .await
}

fn set(conditions: &mut Vec<Condition>, kind: &str, holds: bool, reason: &str, message: &str) {
    let status = if holds { "True" } else { "False" };
    let before = conditions.iter_mut().find(|c| c.type_ == kind);
    let same = before.as_ref().filter(|c| c.status == status).and_then(|c| c.last_transition_time.clone());
    let made = Condition {
        type_: kind.into(),
        status: status.into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_transition_time: Some(same.unwrap_or_else(|| Time(meta::now()))),
        observed_generation: None,
    };
    match before {
        Some(before) => *before = made,
        None => conditions.push(made),
    }
}

async fn change(
    api: &ServerState,
    name: &str,
    edit: impl Fn(&mut CustomResourceDefinition) + Send + Sync,
) -> Result<(), ApiError> {
    let kinds = api.kinds();
    let Some(kind) = kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions") else { return Ok(()) };
    let at = ObjectAddress { kind: &**kind, namespace: None, name };
    let mut change = |current: &Current<'_>| Ok(current.edited(|new| edit(typed_mut(new))));
    match modify(api, &Actor::Server, at, ObjectPart::Whole, UpdateSource::Server, WriteMode::Persist, &mut change)
        .await
    {
        Ok(_) | Err(ApiError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Deletes every object of the definition, waits for those that are held, and lets the definition go.
async fn empty(api: &ServerState, definition: &CustomResourceDefinition) -> Result<(), ApiError> {
    let name = name(definition);
    let terminating = |reason: &'static str, message: &'static str, holds: bool| {
        move |definition: &mut CustomResourceDefinition| {
            let conditions = definition.status.get_or_insert_default().conditions.get_or_insert_default();
            set(conditions, "Terminating", holds, reason, message);
        }
    };
    let begun = ("InstanceDeletionInProgress", "CustomResource deletion is in progress");
    change(api, &name, terminating(begun.0, begun.1, true)).await?;
    if let Some(kind) = kinds(definition).first() {
        clear(api, &**kind).await?;
    }
    change(api, &name, terminating("InstanceDeletionCompleted", "removed all instances", false)).await?;
    change(api, &name, |definition| {
        definition.metadata.finalizers.iter_mut().for_each(|f| f.retain(|f| f != CLEANUP));
        definition.metadata.finalizers.take_if(|f| f.is_empty());
    })
    .await
}

async fn clear(api: &ServerState, kind: &dyn Kind) -> Result<(), ApiError> {
    let d = kind.descriptor();
    let prefix = d.prefix(None);
    loop {
        let snapshot = api.store.list(Range { prefix: &prefix, ..Range::default() }).await?;
        let mut left = 0;
        for entry in snapshot.entries() {
            let mut path = entry.key.rsplit('/');
            let name = path.next().unwrap_or_default();
            let namespace = path.next().filter(|_| d.namespaced);
            match remove(
                api,
                &Actor::Server,
                ObjectAddress { kind, namespace, name },
                &DeleteOptions::default(),
                WriteMode::Persist,
            )
            .await
            {
                Ok(DeleteOutcome::Pending(_)) => left += 1,
                Ok(DeleteOutcome::Removed(_)) | Err(ApiError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        if left == 0 {
            return Ok(());
        }
        // What is left waits for a finalizer; its end is a change like any other.
        let ended = async {
            let mut watch = api.store.watch(&prefix, snapshot.revision).await?;
            while watch.next().await?.new.is_some() {}
            Ok::<_, WatchError>(())
        };
        match ended.await {
            Ok(()) | Err(WatchError::TooOld { .. } | WatchError::Future { .. }) => {}
            Err(WatchError::Closed) => return Ok(()),
            Err(WatchError::Read(error)) => return Err(error.into()),
        }
    }
}
