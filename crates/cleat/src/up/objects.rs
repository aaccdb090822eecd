//! The objects that `cleat up` brings along: its driver and a default class.

use anyhow::{Context as _, Result};
use cleat_api::keys::annotation;
use cleat_drivers::block;
use cleat_runtime::write;
use k8s_openapi::api::storage::v1::{CSIDriver, CSIDriverSpec, StorageClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;

pub const CLASS: &str = "cleat-block";

/// Creates what is missing. What is there stays as its owner left it.
pub async fn ensure(client: &Client) -> Result<()> {
    let driver = CSIDriver {
        metadata: ObjectMeta { name: Some(block::NAME.to_owned()), ..ObjectMeta::default() },
        spec: CSIDriverSpec { attach_required: Some(true), ..CSIDriverSpec::default() },
    };
    let class = StorageClass {
        metadata: ObjectMeta {
            name: Some(CLASS.to_owned()),
            annotations: Some([(annotation::DEFAULT_CLASS.to_owned(), "true".to_owned())].into()),
            ..ObjectMeta::default()
        },
        provisioner: block::NAME.to_owned(),
        parameters: Some([("csi.storage.k8s.io/fstype".to_owned(), "ext4".to_owned())].into()),
        ..StorageClass::default()
    };
    made(write::create(client, &driver).await).context("creating the CSIDriver")?;
    made(write::create(client, &class).await).context("creating the default StorageClass")
}

fn made<K>(result: Result<K, write::WriteError>) -> Result<(), write::WriteError> {
    match result {
        Err(error) if !error.already_exists() => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}
