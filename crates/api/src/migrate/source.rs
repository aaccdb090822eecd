//! Translates the volume source of each in-tree plugin to a CSI source.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    AWSElasticBlockStoreVolumeSource, AzureDiskVolumeSource, CSIPersistentVolumeSource, GCEPersistentDiskVolumeSource,
    PersistentVolume, PersistentVolumeSpec, PortworxVolumeSource, SecretReference, Volume,
    VsphereVirtualDiskVolumeSource,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{
    AWS_EBS, AZURE_DISK, AZURE_FILE, CINDER, GCE_PD, MigrateError, MigratedPlugin, PORTWORX, VSPHERE, ZONE_LABELS,
};
use crate::access::{READ_ONLY_MANY, READ_WRITE_MANY, READ_WRITE_ONCE};
use crate::key::Meta as _;

/// Stands in a handle for a project or zone that the in-tree source does not name.
pub(super) const UNSPECIFIED: &str = "UNSPECIFIED";
pub(super) const RESOURCE_GROUP_ANNOTATION: &str = "kubernetes.io/azure-file-resource-group";
/// Separates the zones in the zone label of a disk that is in several zones.
pub(super) const ZONE_SEPARATOR: &str = "__";

type TranslatedSource = (MigratedPlugin, CSIPersistentVolumeSource);

pub(super) fn translate_source(volume: &PersistentVolume) -> Result<Option<TranslatedSource>, MigrateError> {
    let Some(spec) = &volume.spec else { return Ok(None) };
    Ok(Some(if let Some(ebs) = &spec.aws_elastic_block_store {
        (AWS_EBS, aws_ebs(ebs)?)
    } else if let Some(disk) = &spec.gce_persistent_disk {
        (GCE_PD, gce_pd(disk, &gce_location(volume)?))
    } else if let Some(disk) = &spec.azure_disk {
        (AZURE_DISK, azure_disk(disk))
    } else if let Some(file) = &spec.azure_file {
        let group = volume.metadata.annotation(RESOURCE_GROUP_ANNOTATION).unwrap_or_default();
        let namespace = file.secret_namespace.as_deref().unwrap_or("default");
        (AZURE_FILE, azure_file(group, &file.secret_name, namespace, &file.share_name, file.read_only))
    } else if let Some(disk) = &spec.cinder {
        (CINDER, new_source(CINDER, &disk.volume_id, disk.fs_type.as_ref(), disk.read_only))
    } else if let Some(disk) = &spec.vsphere_volume {
        (VSPHERE, vsphere(disk))
    } else if let Some(disk) = &spec.portworx_volume {
        (PORTWORX, portworx(disk))
    } else {
        return Ok(None);
    }))
}

pub(super) fn translate_pod_volume(volume: &Volume, namespace: &str) -> Result<Option<PersistentVolume>, MigrateError> {
    let access_mode = |read_only: Option<bool>| if read_only == Some(true) { READ_ONLY_MANY } else { READ_WRITE_ONCE };
    let (disk, mode, csi) = if let Some(ebs) = &volume.aws_elastic_block_store {
        let csi = aws_ebs(ebs)?;
        (csi.volume_handle.clone(), READ_WRITE_ONCE, csi)
    } else if let Some(disk) = &volume.gce_persistent_disk {
        let unspecified = format!("zones/{UNSPECIFIED}");
        (disk.pd_name.clone(), access_mode(disk.read_only), gce_pd(disk, &unspecified))
    } else if let Some(disk) = &volume.azure_disk {
        (disk.disk_name.clone(), READ_WRITE_ONCE, azure_disk(disk))
    } else if let Some(file) = &volume.azure_file {
        let namespace = if namespace.is_empty() { "default" } else { namespace };
        let csi = azure_file("", &file.secret_name, namespace, &file.share_name, file.read_only);
        (file.share_name.clone(), READ_WRITE_MANY, csi)
    } else if let Some(disk) = &volume.cinder {
        let csi = new_source(CINDER, &disk.volume_id, disk.fs_type.as_ref(), disk.read_only);
        (disk.volume_id.clone(), READ_WRITE_ONCE, csi)
    } else if let Some(disk) = &volume.vsphere_volume {
        (disk.volume_path.clone(), READ_WRITE_ONCE, vsphere(disk))
    } else if let Some(disk) = &volume.portworx_volume {
        (disk.volume_id.clone(), access_mode(disk.read_only), portworx(disk))
    } else {
        return Ok(None);
    };
    Ok(Some(PersistentVolume {
        metadata: ObjectMeta { name: Some(format!("{}-{disk}", csi.driver)), ..ObjectMeta::default() },
        spec: Some(PersistentVolumeSpec {
            csi: Some(csi),
            access_modes: Some(vec![mode.to_owned()]),
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    }))
}

/// Removes the in-tree source.
pub(super) fn clear_in_tree(spec: &mut PersistentVolumeSpec) {
    spec.aws_elastic_block_store = None;
    spec.gce_persistent_disk = None;
    spec.azure_disk = None;
    spec.azure_file = None;
    spec.cinder = None;
    spec.vsphere_volume = None;
    spec.portworx_volume = None;
}

fn new_source(
    migrated: MigratedPlugin,
    handle: &str,
    fs_type: Option<&String>,
    read_only: Option<bool>,
) -> CSIPersistentVolumeSource {
    CSIPersistentVolumeSource {
        driver: migrated.driver.to_owned(),
        volume_handle: handle.to_owned(),
        fs_type: fs_type.cloned(),
        read_only,
        ..CSIPersistentVolumeSource::default()
    }
}

fn with_attributes(csi: CSIPersistentVolumeSource, attributes: &[(&str, &str)]) -> CSIPersistentVolumeSource {
    let attributes: BTreeMap<_, _> = attributes.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    CSIPersistentVolumeSource { volume_attributes: Some(attributes), ..csi }
}

fn aws_ebs(ebs: &AWSElasticBlockStoreVolumeSource) -> Result<CSIPersistentVolumeSource, MigrateError> {
    // The volume id may be a URL of the form `aws://<zone>/<id>`.
    let handle = match ebs.volume_id.strip_prefix("aws://") {
        None => ebs.volume_id.as_str(),
        Some(rest) => {
            let id = rest.split_once('/').map_or("", |(_, path)| path.trim_matches('/'));
            if !id.starts_with("vol-") || id.contains('/') {
                return Err(MigrateError::EbsVolume(ebs.volume_id.clone()));
            }
            id
        }
    };
    let csi = new_source(AWS_EBS, handle, ebs.fs_type.as_ref(), ebs.read_only);
    Ok(with_attributes(csi, &[("partition", &ebs.partition.unwrap_or(0).to_string())]))
}

/// `location` is `zones/…` or `regions/…`. [`super::repair_handle`] fills in the project later.
fn gce_pd(disk: &GCEPersistentDiskVolumeSource, location: &str) -> CSIPersistentVolumeSource {
    let handle = format!("projects/{UNSPECIFIED}/{location}/disks/{}", disk.pd_name);
    let partition = disk.partition.filter(|number| *number != 0).map(|number| number.to_string());
    with_attributes(
        new_source(GCE_PD, &handle, disk.fs_type.as_ref(), disk.read_only),
        &[("partition", &partition.unwrap_or_default())],
    )
}

/// `zones/<zone>` or `regions/<region>`, from the volume's zone label.
fn gce_location(volume: &PersistentVolume) -> Result<String, MigrateError> {
    let labels = volume.metadata.labels.as_ref();
    let label = ZONE_LABELS.iter().find_map(|name| labels?.get(*name).filter(|zones| !zones.is_empty()));
    let Some(label) = label else { return Ok(format!("zones/{UNSPECIFIED}")) };
    match label.split(ZONE_SEPARATOR).collect::<Vec<_>>()[..] {
        [zone] => Ok(format!("zones/{zone}")),
        ref zones => Ok(format!("regions/{}", gce_region(zones)?)),
    }
}

/// The one region of zones that are named `<continent>-<region>-<letter>`.
pub(super) fn gce_region(zones: &[&str]) -> Result<String, MigrateError> {
    let failed = || MigrateError::Region(zones.join(ZONE_SEPARATOR));
    let region_of = |zone: &&str| match zone.split('-').collect::<Vec<_>>()[..] {
        [continent, region, _] => Ok(format!("{continent}-{region}")),
        _ => Err(failed()),
    };
    let mut regions = zones.iter().map(region_of).collect::<Result<Vec<_>, _>>()?;
    regions.dedup();
    match regions.len() {
        1 => Ok(regions.remove(0)),
        _ => Err(failed()),
    }
}

fn azure_disk(disk: &AzureDiskVolumeSource) -> CSIPersistentVolumeSource {
    let kind = disk.kind.as_deref().unwrap_or("Managed");
    let mut attributes = vec![("kind", kind), ("csi-migration", "true")];
    attributes.extend(disk.caching_mode.as_deref().filter(|mode| !mode.is_empty()).map(|mode| ("cachingMode", mode)));
    attributes.extend(disk.fs_type.as_deref().map(|fs_type| ("fsType", fs_type)));
    with_attributes(new_source(AZURE_DISK, &disk.disk_uri, disk.fs_type.as_ref(), disk.read_only), &attributes)
}

fn azure_file(
    group: &str,
    secret: &str,
    namespace: &str,
    share: &str,
    read_only: Option<bool>,
) -> CSIPersistentVolumeSource {
    // Kubernetes names the secret after the storage account. A secret with another name stands for the account itself.
    let account = secret.strip_prefix("azure-storage-account-").and_then(|rest| rest.strip_suffix("-secret"));
    let account = account.filter(|account| !account.is_empty()).unwrap_or(secret);
    let csi = new_source(AZURE_FILE, &format!("{group}#{account}#{share}#"), None, read_only);
    let secret = SecretReference { name: Some(secret.to_owned()), namespace: Some(namespace.to_owned()) };
    CSIPersistentVolumeSource { node_stage_secret_ref: Some(secret), ..with_attributes(csi, &[("sharename", share)]) }
}

fn vsphere(disk: &VsphereVirtualDiskVolumeSource) -> CSIPersistentVolumeSource {
    let csi = new_source(VSPHERE, &disk.volume_path, disk.fs_type.as_ref(), None);
    match disk.storage_policy_name.as_deref().filter(|name| !name.is_empty()) {
        Some(policy) => with_attributes(csi, &[("storagepolicyname", policy)]),
        None => csi,
    }
}

fn portworx(disk: &PortworxVolumeSource) -> CSIPersistentVolumeSource {
    // The in-tree plugin passed `readOnly` to the mount only, not to the volume.
    new_source(PORTWORX, &disk.volume_id, disk.fs_type.as_ref(), None)
}
