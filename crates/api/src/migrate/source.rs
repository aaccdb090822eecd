//! The table: each old plugin's fields, and the CSI source they become.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    AWSElasticBlockStoreVolumeSource, AzureDiskVolumeSource, CSIPersistentVolumeSource, GCEPersistentDiskVolumeSource,
    PersistentVolume, PersistentVolumeSpec, PortworxVolumeSource, SecretReference, Volume,
    VsphereVirtualDiskVolumeSource,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{AWS_EBS, AZURE_DISK, AZURE_FILE, CINDER, GCE_PD, MigrateError, Moved, PORTWORX, VSPHERE, ZONES};
use crate::access::{READ_ONLY_MANY, READ_WRITE_MANY, READ_WRITE_ONCE};
use crate::key::Meta as _;

/// Stands in a handle for what nobody wrote down.
pub(super) const UNSPECIFIED: &str = "UNSPECIFIED";
pub(super) const RESOURCE_GROUP: &str = "kubernetes.io/azure-file-resource-group";
/// Between the zones of a disk that is in several.
pub(super) const ZONE_SEPARATOR: &str = "__";

type Translated = (Moved, CSIPersistentVolumeSource);

pub(super) fn of_volume(volume: &PersistentVolume) -> Result<Option<Translated>, MigrateError> {
    let Some(spec) = &volume.spec else { return Ok(None) };
    Ok(Some(if let Some(ebs) = &spec.aws_elastic_block_store {
        (AWS_EBS, aws_ebs(ebs)?)
    } else if let Some(disk) = &spec.gce_persistent_disk {
        (GCE_PD, gce_pd(disk, &place(volume)?))
    } else if let Some(disk) = &spec.azure_disk {
        (AZURE_DISK, azure_disk(disk))
    } else if let Some(file) = &spec.azure_file {
        let group = volume.metadata.annotation(RESOURCE_GROUP).unwrap_or_default();
        let namespace = file.secret_namespace.as_deref().unwrap_or("default");
        (AZURE_FILE, azure_file(group, &file.secret_name, namespace, &file.share_name, file.read_only))
    } else if let Some(disk) = &spec.cinder {
        (CINDER, plain(CINDER, &disk.volume_id, disk.fs_type.as_ref(), disk.read_only))
    } else if let Some(disk) = &spec.vsphere_volume {
        (VSPHERE, vsphere(disk))
    } else if let Some(disk) = &spec.portworx_volume {
        (PORTWORX, portworx(disk))
    } else {
        return Ok(None);
    }))
}

pub(super) fn of_pod(volume: &Volume, namespace: &str) -> Result<Option<PersistentVolume>, MigrateError> {
    let readers = |read_only: Option<bool>| if read_only == Some(true) { READ_ONLY_MANY } else { READ_WRITE_ONCE };
    let (disk, mode, csi) = if let Some(ebs) = &volume.aws_elastic_block_store {
        let csi = aws_ebs(ebs)?;
        (csi.volume_handle.clone(), READ_WRITE_ONCE, csi)
    } else if let Some(disk) = &volume.gce_persistent_disk {
        let nowhere = format!("zones/{UNSPECIFIED}");
        (disk.pd_name.clone(), readers(disk.read_only), gce_pd(disk, &nowhere))
    } else if let Some(disk) = &volume.azure_disk {
        (disk.disk_name.clone(), READ_WRITE_ONCE, azure_disk(disk))
    } else if let Some(file) = &volume.azure_file {
        let namespace = if namespace.is_empty() { "default" } else { namespace };
        let csi = azure_file("", &file.secret_name, namespace, &file.share_name, file.read_only);
        (file.share_name.clone(), READ_WRITE_MANY, csi)
    } else if let Some(disk) = &volume.cinder {
        let csi = plain(CINDER, &disk.volume_id, disk.fs_type.as_ref(), disk.read_only);
        (disk.volume_id.clone(), READ_WRITE_ONCE, csi)
    } else if let Some(disk) = &volume.vsphere_volume {
        (disk.volume_path.clone(), READ_WRITE_ONCE, vsphere(disk))
    } else if let Some(disk) = &volume.portworx_volume {
        (disk.volume_id.clone(), readers(disk.read_only), portworx(disk))
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

/// Takes the old source away.
pub(super) fn clear(spec: &mut PersistentVolumeSpec) {
    spec.aws_elastic_block_store = None;
    spec.gce_persistent_disk = None;
    spec.azure_disk = None;
    spec.azure_file = None;
    spec.cinder = None;
    spec.vsphere_volume = None;
    spec.portworx_volume = None;
}

fn plain(moved: Moved, handle: &str, fs_type: Option<&String>, read_only: Option<bool>) -> CSIPersistentVolumeSource {
    CSIPersistentVolumeSource {
        driver: moved.driver.to_owned(),
        volume_handle: handle.to_owned(),
        fs_type: fs_type.cloned(),
        read_only,
        ..CSIPersistentVolumeSource::default()
    }
}

fn with(csi: CSIPersistentVolumeSource, attributes: &[(&str, &str)]) -> CSIPersistentVolumeSource {
    let attributes: BTreeMap<_, _> = attributes.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    CSIPersistentVolumeSource { volume_attributes: Some(attributes), ..csi }
}

fn aws_ebs(ebs: &AWSElasticBlockStoreVolumeSource) -> Result<CSIPersistentVolumeSource, MigrateError> {
    // Old volumes are named like a URL with the zone as its host.
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
    let csi = plain(AWS_EBS, handle, ebs.fs_type.as_ref(), ebs.read_only);
    Ok(with(csi, &[("partition", &ebs.partition.unwrap_or(0).to_string())]))
}

/// `place` is `zones/…` or `regions/…`; the project is for [`super::repair_handle`] to find.
fn gce_pd(disk: &GCEPersistentDiskVolumeSource, place: &str) -> CSIPersistentVolumeSource {
    let handle = format!("projects/{UNSPECIFIED}/{place}/disks/{}", disk.pd_name);
    let partition = disk.partition.filter(|number| *number != 0).map(|number| number.to_string());
    with(
        plain(GCE_PD, &handle, disk.fs_type.as_ref(), disk.read_only),
        &[("partition", &partition.unwrap_or_default())],
    )
}

fn place(volume: &PersistentVolume) -> Result<String, MigrateError> {
    let labels = volume.metadata.labels.as_ref();
    let label = ZONES.iter().find_map(|name| labels?.get(*name).filter(|zones| !zones.is_empty()));
    let Some(label) = label else { return Ok(format!("zones/{UNSPECIFIED}")) };
    match label.split(ZONE_SEPARATOR).collect::<Vec<_>>()[..] {
        [zone] => Ok(format!("zones/{zone}")),
        ref zones => Ok(format!("regions/{}", region(zones)?)),
    }
}

/// Of zones that are called `<continent>-<region>-<letter>`.
pub(super) fn region(zones: &[&str]) -> Result<String, MigrateError> {
    let failed = || MigrateError::Region(zones.join(ZONE_SEPARATOR));
    let of = |zone: &&str| match zone.split('-').collect::<Vec<_>>()[..] {
        [continent, region, _] => Ok(format!("{continent}-{region}")),
        _ => Err(failed()),
    };
    let mut regions = zones.iter().map(of).collect::<Result<Vec<_>, _>>()?;
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
    with(plain(AZURE_DISK, &disk.disk_uri, disk.fs_type.as_ref(), disk.read_only), &attributes)
}

fn azure_file(
    group: &str,
    secret: &str,
    namespace: &str,
    share: &str,
    read_only: Option<bool>,
) -> CSIPersistentVolumeSource {
    // The account is in the secret's name, unless somebody named the secret differently.
    let account = secret.strip_prefix("azure-storage-account-").and_then(|rest| rest.strip_suffix("-secret"));
    let account = account.filter(|account| !account.is_empty()).unwrap_or(secret);
    let csi = plain(AZURE_FILE, &format!("{group}#{account}#{share}#"), None, read_only);
    let secret = SecretReference { name: Some(secret.to_owned()), namespace: Some(namespace.to_owned()) };
    CSIPersistentVolumeSource { node_stage_secret_ref: Some(secret), ..with(csi, &[("sharename", share)]) }
}

fn vsphere(disk: &VsphereVirtualDiskVolumeSource) -> CSIPersistentVolumeSource {
    let csi = plain(VSPHERE, &disk.volume_path, disk.fs_type.as_ref(), None);
    match disk.storage_policy_name.as_deref().filter(|name| !name.is_empty()) {
        Some(policy) => with(csi, &[("storagepolicyname", policy)]),
        None => csi,
    }
}

fn portworx(disk: &PortworxVolumeSource) -> CSIPersistentVolumeSource {
    // Its read-only flag has always been left to the mount.
    plain(PORTWORX, &disk.volume_id, disk.fs_type.as_ref(), None)
}
