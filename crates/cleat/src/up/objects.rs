//! The objects that `cleat up` brings along: its driver, a default class, and one that waits for the pod.

use anyhow::{Context as _, Result};
use cleat_api::claim::WAIT_FOR_FIRST_CONSUMER;
use cleat_api::well_known::annotation;
use cleat_drivers::block;
use cleat_runtime::write;
use k8s_openapi::api::storage::v1::{CSIDriver, CSIDriverSpec, StorageClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;

pub const CLASS: &str = "cleat-block";
/// Its volumes are made when a pod that uses them has found its node.
pub const WAIT_CLASS: &str = "cleat-block-wait";

/// Creates what is missing. What is there stays as its owner left it.
pub async fn ensure(client: &Client) -> Result<()> {
    let driver = CSIDriver {
        metadata: ObjectMeta { name: Some(block::NAME.to_owned()), ..ObjectMeta::default() },
        spec: CSIDriverSpec { attach_required: Some(true), ..CSIDriverSpec::default() },
    };
    let class = |name: &str| StorageClass {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        provisioner: block::NAME.to_owned(),
        parameters: Some([("csi.storage.k8s.io/fstype".to_owned(), "ext4".to_owned())].into()),
        ..StorageClass::default()
    };
    let mut default = class(CLASS);
    default.metadata.annotations = Some([(annotation::DEFAULT_CLASS.to_owned(), "true".to_owned())].into());
    let waiting = StorageClass { volume_binding_mode: Some(WAIT_FOR_FIRST_CONSUMER.to_owned()), ..class(WAIT_CLASS) };
    made(write::create(client, &driver).await).context("creating the CSIDriver")?;
    made(write::create(client, &default).await).context("creating the default StorageClass")?;
    made(write::create(client, &waiting).await).context("creating the waiting StorageClass")
}

fn made<K>(result: Result<K, write::WriteError>) -> Result<(), write::WriteError> {
    match result {
        Err(error) if !error.already_exists() => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}
