//! Admission: rules that read other objects, and defaults that the kind's own strategy does not set. Runs before the
//! kind's validation.

use cleat_api::claim::default_class;
use cleat_api::well_known::{annotation, finalizer, taint};
use cleat_apimachinery::address::ObjectAddress;
use cleat_store::Range;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, PodSpec, Taint, Toleration};
use k8s_openapi::api::storage::v1::StorageClass;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::state::ServerState;
use cleat_apimachinery::error::{ApiError, StatusCause};
use cleat_apimachinery::kind::{Kind, Object, typed, typed_mut};

const NAMESPACES: &str = "/registry/namespaces/";
const SERVICE_ACCOUNTS: &str = "/registry/serviceaccounts/";
const STORAGE_CLASSES: &str = "/registry/storageclasses/";
const DEFAULT_TOLERATION_SECONDS: i64 = 300;
/// Namespaces that may not be deleted.
const PERMANENT_NAMESPACES: [&str; 3] = ["default", "kube-system", "kube-public"];

pub(crate) async fn admit_create(api: &ServerState, kind: &dyn Kind, object: &mut dyn Object) -> Result<(), ApiError> {
    let d = kind.descriptor();
    if let Some(namespace) = object.meta().namespace.clone() {
        check_namespace(api, kind, object, &namespace).await?;
    }
    match (d.group.as_str(), d.plural.as_str()) {
        ("", "persistentvolumeclaims") => {
            set_default_class(api, typed_mut(object)).await?;
            add_finalizer(object, finalizer::PVC_PROTECTION);
        }
        ("", "persistentvolumes") => add_finalizer(object, finalizer::PV_PROTECTION),
        ("storage.k8s.io", "volumeattributesclasses") => add_finalizer(object, finalizer::VAC_PROTECTION),
        ("", "nodes") => taint_not_ready(typed_mut(object)),
        ("", "pods") => {
            set_pod_defaults(typed_mut(object));
            check_service_account(api, kind, typed(object)).await?;
        }
        _ => {}
    }
    Ok(())
}

/// Runs for updates of the main resource, not for those of subresources.
pub(crate) async fn admit_update(
    api: &ServerState,
    kind: &dyn Kind,
    new: &mut dyn Object,
    old: &dyn Object,
) -> Result<(), ApiError> {
    let d = kind.descriptor();
    match (d.group.as_str(), d.plural.as_str()) {
        ("", "persistentvolumeclaims") => check_expansion(api, kind, typed(new), typed(old)).await,
        ("", "pods") => {
            add_not_ready_tolerations(typed_mut::<Pod>(new).spec.get_or_insert_default());
            Ok(())
        }
        _ => Ok(()),
    }
}

pub(crate) fn admit_delete(at: ObjectAddress<'_>) -> Result<(), ApiError> {
    let d = at.descriptor();
    if d.plural == "namespaces" && d.group.is_empty() && PERMANENT_NAMESPACES.contains(&at.name) {
        return Err(ApiError::forbidden(d, at.name, "this namespace may not be deleted"));
    }
    Ok(())
}

/// Whether an object is being deleted. The other fields are not decoded: the namespace is read with every create.
#[derive(Deserialize)]
struct DeletionState {
    metadata: DeletionMetadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DeletionMetadata {
    deletion_timestamp: Option<IgnoredAny>,
}

/// Objects are created only in namespaces that exist and are not being deleted.
async fn check_namespace(
    api: &ServerState,
    kind: &dyn Kind,
    object: &dyn Object,
    namespace: &str,
) -> Result<(), ApiError> {
    let missing = || {
        let resource = cleat_apimachinery::descriptor::Resource { group: String::new(), plural: "namespaces".into() };
        ApiError::NotFound { resource, name: namespace.into() }
    };
    let entry = api.store.get(&format!("{NAMESPACES}{namespace}")).await?.ok_or_else(missing)?;
    let state: DeletionState = serde_json::from_slice(&entry.value).map_err(|e| ApiError::Internal(e.to_string()))?;
    if state.metadata.deletion_timestamp.is_none() {
        return Ok(());
    }
    let name = object.meta().name.clone().unwrap_or_default();
    Err(ApiError::Forbidden {
        resource: kind.descriptor().resource(),
        name,
        why: format!("unable to create new content in namespace {namespace} because it is being terminated"),
        cause: Some(Box::new(StatusCause {
            reason: "NamespaceTerminating",
            message: format!("namespace {namespace} is being terminated"),
            field: "metadata.namespace",
        })),
    })
}

async fn storage_classes(api: &ServerState) -> Result<Vec<StorageClass>, ApiError> {
    let snapshot = api.store.list(Range { prefix: STORAGE_CLASSES, ..Range::default() }).await?;
    Ok(snapshot.entries().filter_map(|e| serde_json::from_slice(&e.value).ok()).collect())
}

/// Sets the default StorageClass, if there is one, on a claim that names no class.
async fn set_default_class(api: &ServerState, claim: &mut PersistentVolumeClaim) -> Result<(), ApiError> {
    let has_annotation =
        claim.metadata.annotations.as_ref().is_some_and(|a| a.contains_key(annotation::STORAGE_CLASS_BETA));
    let spec = claim.spec.get_or_insert_default();
    if has_annotation || spec.storage_class_name.is_some() {
        return Ok(());
    }
    let classes = storage_classes(api).await?;
    spec.storage_class_name = default_class(&classes).and_then(|class| class.metadata.name.clone());
    Ok(())
}

/// The service account, the priority and the tolerations of a pod that does not set them.
fn set_pod_defaults(pod: &mut Pod) {
    let spec = pod.spec.get_or_insert_default();
    let account = spec.service_account_name.get_or_insert_with(|| "default".into()).clone();
    spec.service_account = Some(account);
    spec.priority.get_or_insert(0);
    spec.preemption_policy.get_or_insert_with(|| "PreemptLowerPriority".into());
    add_not_ready_tolerations(spec);
}

/// The service account must exist, except `default`: its controller creates it shortly after the namespace.
async fn check_service_account(api: &ServerState, kind: &dyn Kind, pod: &Pod) -> Result<(), ApiError> {
    let account = pod.spec.as_ref().and_then(|s| s.service_account_name.as_deref()).unwrap_or_default();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    if account == "default" || api.store.get(&format!("{SERVICE_ACCOUNTS}{namespace}/{account}")).await?.is_some() {
        return Ok(());
    }
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let why = format!("error looking up service account {namespace}/{account}: serviceaccount \"{account}\" not found");
    Err(ApiError::forbidden(kind.descriptor(), name, why))
}

/// Pods stay for five minutes on a node that is not ready or unreachable, unless they say otherwise.
fn add_not_ready_tolerations(spec: &mut PodSpec) {
    let tolerations = spec.tolerations.get_or_insert_default();
    for key in [taint::NOT_READY, "node.kubernetes.io/unreachable"] {
        let is_covered = tolerations.iter().any(|t| {
            let effect = t.effect.as_deref().unwrap_or_default();
            let tolerated = t.key.as_deref().unwrap_or_default();
            (effect.is_empty() || effect == "NoExecute") && (tolerated.is_empty() || tolerated == key)
        });
        if !is_covered {
            tolerations.push(Toleration {
                key: Some(key.into()),
                operator: Some("Exists".into()),
                effect: Some("NoExecute".into()),
                toleration_seconds: Some(DEFAULT_TOLERATION_SECONDS),
                ..Default::default()
            });
        }
    }
}

/// A new node takes no pods until the node lifecycle controller has observed that it is ready and removed the taint.
fn taint_not_ready(node: &mut Node) {
    let taints = node.spec.get_or_insert_default().taints.get_or_insert_default();
    if !taints.iter().any(|t| t.key == taint::NOT_READY && t.effect == "NoSchedule") {
        let (key, effect) = (taint::NOT_READY.into(), "NoSchedule".into());
        taints.push(Taint { key, effect, ..Taint::default() });
    }
}

fn add_finalizer(object: &mut dyn Object, finalizer: &str) {
    let finalizers = object.meta_mut().finalizers.get_or_insert_default();
    if !finalizers.iter().any(|f| f == finalizer) {
        finalizers.push(finalizer.into());
    }
}

/// A claim may request more storage only if it is bound and its class allows expansion.
async fn check_expansion(
    api: &ServerState,
    kind: &dyn Kind,
    new: &PersistentVolumeClaim,
    old: &PersistentVolumeClaim,
) -> Result<(), ApiError> {
    use cleat_api::claim::{claim_class, claim_phase, requested_storage};
    match (requested_storage(new), requested_storage(old)) {
        (Some(new), Some(old)) if new > old => {}
        _ => return Ok(()),
    }
    let name = old.metadata.name.as_deref().unwrap_or_default();
    if claim_phase(old) != "Bound" {
        return Err(ApiError::forbidden(
            kind.descriptor(),
            name,
            "Only bound persistent volume claims can be expanded",
        ));
    }
    let wanted = claim_class(old).unwrap_or_default();
    let class = api.store.get(&format!("{STORAGE_CLASSES}{wanted}")).await?;
    let class = class.and_then(|e| serde_json::from_slice::<StorageClass>(&e.value).ok());
    if class.is_some_and(|c| c.allow_volume_expansion == Some(true)) {
        return Ok(());
    }
    let why = "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support \
               resize";
    Err(ApiError::forbidden(kind.descriptor(), name, why))
}
