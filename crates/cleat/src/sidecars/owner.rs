//! The owner of the objects that a sidecar creates: the pod it runs in, or a controller above that pod.

use anyhow::{Context as _, Result, bail};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube::{Client, ResourceExt as _};

/// Follows controller references `level` steps up from the pod: 0 is the pod itself, 1 its ReplicaSet or DaemonSet, 2 the
/// owner of that. Fails if an object on the path does not exist or has no controller.
pub(super) async fn owner_of_pod(client: &Client, namespace: &str, pod: &str, level: i32) -> Result<OwnerReference> {
    let mut name = pod.to_owned();
    let mut kind = GroupVersionKind::gvk("", "v1", "Pod");
    for step in 0.. {
        let resource = ApiResource::from_gvk(&kind);
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
        let object = api.get(&name).await.with_context(|| format!("reading the owner, {} {name}", kind.kind))?;
        if step == level {
            return Ok(OwnerReference {
                api_version: kind.api_version(),
                kind: kind.kind,
                name,
                uid: object.uid().unwrap_or_default(),
                controller: Some(true),
                block_owner_deletion: None,
            });
        }
        let controller = object.owner_references().iter().find(|o| o.controller == Some(true)).cloned();
        let Some(owner) = controller else {
            bail!("{} {name} has no owner: try --capacity-ownerref-level={step}", kind.kind)
        };
        let (group, version) = owner.api_version.split_once('/').unwrap_or(("", &owner.api_version));
        kind = GroupVersionKind::gvk(group, version, &owner.kind);
        name = owner.name;
    }
    bail!("--capacity-ownerref-level must not be negative")
}
