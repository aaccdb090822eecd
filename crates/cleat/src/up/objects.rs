//! The objects that `cleat up` creates: the CSIDriver, the default StorageClass, and one that binds when a pod uses the claim.

use anyhow::{Context as _, Result};
use cleat_api::claim::WAIT_FOR_FIRST_CONSUMER;
use cleat_api::well_known::annotation;
use cleat_drivers::block;
use cleat_runtime::{Client, write};
use k8s_openapi::api::storage::v1::{CSIDriver, CSIDriverSpec, StorageClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// The default StorageClass. Its volumes are created immediately.
pub const CLASS: &str = "cleat-block";
/// The StorageClass whose volumes are created when a pod that uses the claim has been scheduled.
pub const WAIT_CLASS: &str = "cleat-block-wait";

/// Creates the objects that do not exist. Existing objects are not changed, so that a user can edit them.
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
    ignore_existing(write::create(client, &driver).await).context("creating the CSIDriver")?;
    ignore_existing(write::create(client, &default).await).context("creating the default StorageClass")?;
    ignore_existing(write::create(client, &waiting).await).context("creating the WaitForFirstConsumer StorageClass")
}

/// Turns "already exists" into success.
fn ignore_existing<K>(result: Result<K, write::WriteError>) -> Result<(), write::WriteError> {
    match result {
        Err(error) if !error.already_exists() => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}
