//! Provisioning for classes of in-tree plugins: the class is translated for the CSI driver, and the volume that the driver
//! creates is stored in the in-tree form.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    AWSElasticBlockStoreVolumeSource, AzureDiskVolumeSource, AzureFilePersistentVolumeSource,
    CSIPersistentVolumeSource, CinderPersistentVolumeSource, GCEPersistentDiskVolumeSource, NodeSelectorRequirement,
    NodeSelectorTerm, PersistentVolume, PortworxVolumeSource, TopologySelectorLabelRequirement, TopologySelectorTerm,
    VsphereVirtualDiskVolumeSource,
};
use k8s_openapi::api::storage::v1::StorageClass;

use super::source::{RESOURCE_GROUP_ANNOTATION, ZONE_SEPARATOR, gce_region};
use super::{
    AWS_EBS, AZURE_DISK, AZURE_FILE, CINDER, GCE_PD, MIGRATED_PLUGINS, MigrateError, MigratedPlugin, PORTWORX, VSPHERE,
    ZONE_LABELS,
};
use crate::well_known::{CSI_PARAMETER_PREFIX, label};

const VSPHERE_ZONE: &str = "topology.csi.vmware.com/zone";
const VSPHERE_REGION: &str = "topology.csi.vmware.com/region";
/// The in-tree parameters that the driver accepts with the suffix `-migrationparam`.
const VSPHERE_OPTIONS: [&str; 8] = [
    "datastore",
    "diskformat",
    "hostfailurestotolerate",
    "forceprovisioning",
    "cachereservation",
    "diskstripes",
    "objectspacereservation",
    "iopslimit",
];
/// The in-tree parameter of the secret, and the suffix of the CSI parameters that replace it.
const PORTWORX_SECRET: [(&str, &str); 2] =
    [("openstorage.io/auth-secret-name", "name"), ("openstorage.io/auth-secret-namespace", "namespace")];
const PORTWORX_PURPOSES: [&str; 6] =
    ["provisioner", "controller-publish", "node-publish", "node-stage", "controller-expand", "node-expand"];

/// The class with parameters and topologies for the CSI driver. The provisioner stays the plugin's. A class of another
/// provisioner is returned unchanged.
pub fn translate_class(class: &StorageClass) -> Result<Cow<'_, StorageClass>, MigrateError> {
    let Some(migrated) = MIGRATED_PLUGINS.iter().find(|migrated| migrated.plugin == class.provisioner) else {
        return Ok(Cow::Borrowed(class));
    };
    let mut parameters = BTreeMap::new();
    let mut zones = None;
    for (key, value) in class.parameters.iter().flatten() {
        match (*migrated, key.to_lowercase().as_str()) {
            (AWS_EBS | GCE_PD | AZURE_DISK, "zone") => zones = Some(vec![value.clone()]),
            (AWS_EBS | GCE_PD | AZURE_DISK, "zones") => zones = Some(value.split(',').map(ToOwned::to_owned).collect()),
            (AWS_EBS | GCE_PD | CINDER | VSPHERE, "fstype") => {
                parameters.insert(format!("{CSI_PARAMETER_PREFIX}fstype"), value.clone());
            }
            (AWS_EBS, "iopspergb") => {
                parameters.insert(key.clone(), value.clone());
                // The in-tree plugin raised the IOPS of small disks to the minimum of EBS.
                parameters.insert("allowautoiopspergbincrease".to_owned(), "true".to_owned());
            }
            (VSPHERE, "storagepolicyname") => {
                parameters.insert("storagepolicyname".to_owned(), value.clone());
            }
            (VSPHERE, option) => {
                if VSPHERE_OPTIONS.contains(&option) {
                    parameters.insert(format!("{option}-migrationparam"), value.clone());
                }
            }
            (PORTWORX, lower) => match PORTWORX_SECRET.iter().find(|(key, _)| *key == lower) {
                Some((_, part)) => parameters.extend(
                    PORTWORX_PURPOSES
                        .map(|purpose| (format!("{CSI_PARAMETER_PREFIX}{purpose}-secret-{part}"), value.clone())),
                ),
                None => {
                    parameters.insert(key.clone(), value.clone());
                }
            },
            _ => {
                parameters.insert(key.clone(), value.clone());
            }
        }
    }
    if *migrated == VSPHERE {
        // The driver then returns the volume's path, which the in-tree form stores.
        parameters.insert("csimigration".to_owned(), "true".to_owned());
    }
    let mut translated = class.clone();
    translated.parameters = Some(parameters).filter(|p| !p.is_empty());
    translated.allowed_topologies = translate_topologies(*migrated, zones, class)?;
    Ok(Cow::Owned(translated))
}

fn translate_topologies(
    migrated: MigratedPlugin,
    zones: Option<Vec<String>>,
    class: &StorageClass,
) -> Result<Option<Vec<TopologySelectorTerm>>, MigrateError> {
    let allowed = class.allowed_topologies.clone().filter(|terms| !terms.is_empty());
    let zone_key = if migrated == VSPHERE { Some(VSPHERE_ZONE) } else { migrated.zone_key };
    let Some(zone_key) = zone_key else { return Ok(allowed) };
    let mut terms = match (zones, allowed) {
        (Some(_), Some(_)) => return Err(MigrateError::ZonesTwice),
        (None, None) => return Ok(None),
        (Some(values), None) => {
            let rule = TopologySelectorLabelRequirement { key: zone_key.to_owned(), values };
            vec![TopologySelectorTerm { match_label_expressions: Some(vec![rule]) }]
        }
        (None, Some(terms)) => terms,
    };
    for rule in terms.iter_mut().flat_map(|term| term.match_label_expressions.iter_mut().flatten()) {
        if ZONE_LABELS.contains(&rule.key.as_str()) {
            zone_key.clone_into(&mut rule.key);
        }
        // For a region without zones the in-tree plugin used fault domain numbers; the driver uses an empty zone.
        if migrated == AZURE_DISK && rule.key == zone_key {
            let is_fault_domain = |zone: &str| !zone.is_empty() && zone.bytes().all(|b| b.is_ascii_digit());
            rule.values.iter_mut().filter(|zone| is_fault_domain(zone)).for_each(String::clear);
        }
    }
    Ok(Some(terms))
}

/// The volume that a CSI driver created for a class of `plugin`, in that plugin's in-tree form. A volume without a CSI source, or
/// of a plugin that was not migrated, is returned unchanged.
pub fn to_in_tree_volume(plugin: &str, mut volume: PersistentVolume) -> Result<PersistentVolume, MigrateError> {
    let Some(migrated) = MIGRATED_PLUGINS.iter().find(|migrated| migrated.plugin == plugin) else { return Ok(volume) };
    let Some(csi) = volume.spec.as_mut().and_then(|spec| spec.csi.take()) else { return Ok(volume) };
    match *migrated {
        AWS_EBS => translate_affinity(&mut volume, AWS_EBS.zone_key, Some(aws_region))?,
        GCE_PD => translate_affinity(&mut volume, GCE_PD.zone_key, Some(gce_region))?,
        CINDER => translate_affinity(&mut volume, CINDER.zone_key, None)?,
        VSPHERE => {
            rename_affinity_key(&mut volume, VSPHERE_REGION, label::REGION);
            translate_affinity(&mut volume, Some(VSPHERE_ZONE), None)?;
            let regions = affinity_values(&volume, label::REGION);
            regions.into_iter().take(1).for_each(|region| set_label(&mut volume, label::REGION, region));
        }
        _ => {}
    }
    let meta = &mut volume.metadata;
    let spec = volume.spec.get_or_insert_default();
    let handle = csi.volume_handle.clone();
    match *migrated {
        AWS_EBS => {
            spec.aws_elastic_block_store = Some(AWSElasticBlockStoreVolumeSource {
                partition: partition(&csi)?,
                fs_type: csi.fs_type,
                read_only: csi.read_only,
                volume_id: handle,
            });
        }
        GCE_PD => {
            let disk = handle.split('/').nth(5).ok_or_else(|| MigrateError::Handle(handle.clone()))?;
            spec.gce_persistent_disk = Some(GCEPersistentDiskVolumeSource {
                partition: partition(&csi)?,
                fs_type: csi.fs_type,
                read_only: csi.read_only,
                pd_name: disk.to_owned(),
            });
        }
        AZURE_DISK => spec.azure_disk = Some(azure_disk(&csi)?),
        AZURE_FILE => {
            let (file, group) = azure_file(&csi)?;
            spec.azure_file = Some(file);
            if let Some(group) = group {
                meta.annotations.get_or_insert_default().insert(RESOURCE_GROUP_ANNOTATION.to_owned(), group);
            }
        }
        CINDER => {
            spec.cinder = Some(CinderPersistentVolumeSource {
                fs_type: csi.fs_type,
                read_only: csi.read_only,
                volume_id: handle,
                ..CinderPersistentVolumeSource::default()
            });
        }
        VSPHERE => {
            let path = csi.volume_attributes.as_ref().and_then(|a| a.get("initialvolumefilepath"));
            spec.vsphere_volume = Some(VsphereVirtualDiskVolumeSource {
                volume_path: path.cloned().unwrap_or_default(),
                fs_type: csi.fs_type,
                ..VsphereVirtualDiskVolumeSource::default()
            });
        }
        _ => {
            spec.portworx_volume =
                Some(PortworxVolumeSource { fs_type: csi.fs_type, read_only: csi.read_only, volume_id: handle });
        }
    }
    Ok(volume)
}

fn partition(csi: &CSIPersistentVolumeSource) -> Result<Option<i32>, MigrateError> {
    let value = csi.volume_attributes.as_ref().and_then(|a| a.get("partition")).filter(|text| !text.is_empty());
    value.map(|text| text.parse().map_err(|_| MigrateError::Partition(text.clone()))).transpose()
}

fn azure_disk(csi: &CSIPersistentVolumeSource) -> Result<AzureDiskVolumeSource, MigrateError> {
    let uri = &csi.volume_handle;
    let name = match uri.split_once("/providers/Microsoft.Compute/disks/") {
        Some((before, name)) if before.contains("/subscriptions/") && before.contains("/resourceGroups/") => Some(name),
        _ => uri.split_once("/vhds/").filter(|(host, _)| host.starts_with("http")).map(|(_, name)| name),
    };
    let name = name.filter(|name| !name.is_empty()).ok_or_else(|| MigrateError::Handle(uri.clone()))?;
    let attribute = |key: &str| {
        let mut attributes = csi.volume_attributes.iter().flatten();
        attributes.find(|(k, v)| k.eq_ignore_ascii_case(key) && !v.is_empty()).map(|(_, v)| v.clone())
    };
    Ok(AzureDiskVolumeSource {
        disk_name: name.to_owned(),
        disk_uri: uri.clone(),
        caching_mode: attribute("cachingmode"),
        fs_type: attribute("fstype").or_else(|| csi.fs_type.clone()),
        kind: Some("Managed".to_owned()),
        read_only: Some(csi.read_only.unwrap_or(false)),
    })
}

/// The share, and the resource group if it had to be read from the handle.
fn azure_file(
    csi: &CSIPersistentVolumeSource,
) -> Result<(AzureFilePersistentVolumeSource, Option<String>), MigrateError> {
    let attribute = |key: &str| {
        let mut attributes = csi.volume_attributes.iter().flatten();
        attributes.find(|(k, v)| k.eq_ignore_ascii_case(key) && !v.is_empty()).map(|(_, v)| v.clone())
    };
    let staged = csi.node_stage_secret_ref.as_ref().filter(|s| s.name.as_deref().is_some_and(|n| !n.is_empty()));
    let (share, secret) =
        (attribute("sharename"), staged.and_then(|s| s.name.clone()).or_else(|| attribute("secretname")));
    let namespace = staged.and_then(|s| s.namespace.clone()).or_else(|| attribute("secretnamespace"));
    let (share, secret, group) = match (share, secret) {
        (Some(share), Some(secret)) => (share, secret, None),
        (share, secret) => {
            let [group, account, shared, ..] = csi.volume_handle.split('#').collect::<Vec<_>>()[..] else {
                return Err(MigrateError::Handle(csi.volume_handle.clone()));
            };
            let secret = secret.unwrap_or_else(|| format!("azure-storage-account-{account}-secret"));
            let group = Some(group.to_owned()).filter(|group| !group.is_empty());
            (share.unwrap_or_else(|| shared.to_owned()), secret, group)
        }
    };
    let file = AzureFilePersistentVolumeSource {
        read_only: csi.read_only,
        secret_name: secret,
        secret_namespace: Some(namespace.unwrap_or_else(|| "default".to_owned())),
        share_name: share,
    };
    Ok((file, group))
}

type RegionOf = fn(&[&str]) -> Result<String, MigrateError>;

/// Renames the driver's zone key in the node affinity to the well-known label, adds the region if `region_of` is given, and
/// labels the volume with both.
fn translate_affinity(
    volume: &mut PersistentVolume,
    zone_key: Option<&str>,
    region_of: Option<RegionOf>,
) -> Result<(), MigrateError> {
    zone_key.into_iter().for_each(|key| rename_affinity_key(volume, key, label::ZONE));
    if let Some(region_of) = region_of {
        for term in affinity_terms(volume) {
            let rules = term.match_expressions.get_or_insert_default();
            let zones: Vec<&str> = rules
                .iter()
                .filter(|rule| rule.key == label::ZONE)
                .flat_map(|rule| rule.values.iter().flatten().map(String::as_str))
                .collect();
            if zones.is_empty() || rules.iter().any(|rule| rule.key == label::REGION) {
                continue;
            }
            let region = region_of(&zones)?;
            rules.push(NodeSelectorRequirement {
                key: label::REGION.to_owned(),
                operator: "In".to_owned(),
                values: Some(vec![region]),
            });
        }
        if let [region] = &affinity_values(volume, label::REGION)[..] {
            set_label(volume, label::REGION, region.clone());
        }
    }
    let zones = affinity_values(volume, label::ZONE);
    if !zones.is_empty() {
        set_label(volume, label::ZONE, zones.join(ZONE_SEPARATOR));
    }
    Ok(())
}

fn affinity_terms(volume: &mut PersistentVolume) -> impl Iterator<Item = &mut NodeSelectorTerm> {
    let affinity = volume.spec.as_mut().and_then(|spec| spec.node_affinity.as_mut());
    affinity.and_then(|a| a.required.as_mut()).into_iter().flat_map(|required| required.node_selector_terms.iter_mut())
}

fn rename_affinity_key(volume: &mut PersistentVolume, from: &str, to: &str) {
    let rules = affinity_terms(volume).flat_map(|term| term.match_expressions.iter_mut().flatten());
    rules.filter(|rule| rule.key == from).for_each(|rule| to.clone_into(&mut rule.key));
}

/// All values of a label in the volume's node affinity, sorted.
fn affinity_values(volume: &PersistentVolume, key: &str) -> Vec<String> {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let terms = affinity.and_then(|a| a.required.as_ref()).into_iter().flat_map(|r| r.node_selector_terms.iter());
    let rules = terms.flat_map(|term| term.match_expressions.iter().flatten()).filter(|rule| rule.key == key);
    let all: BTreeSet<String> = rules.flat_map(|rule| rule.values.iter().flatten().cloned()).collect();
    all.into_iter().collect()
}

/// Does not overwrite a label that the volume has.
fn set_label(volume: &mut PersistentVolume, key: &str, value: String) {
    volume.metadata.labels.get_or_insert_default().entry(key.to_owned()).or_insert(value);
}

/// The one region of zones that are named like `us-west-2a`, `us-gov-east-1a`, `us-west-2-lax-1a` or `us-east-1-wl1-bos-wlz-1`.
fn aws_region(zones: &[&str]) -> Result<String, MigrateError> {
    let failed = || MigrateError::Region(zones.join(ZONE_SEPARATOR));
    let region_of = |zone: &&str| {
        let parts: Vec<&str> = zone.split('-').collect();
        match (parts.len(), parts.last()) {
            (3 | 4, Some(last)) if last.len() == 2 => Ok(zone[..zone.len() - 1].to_owned()),
            (5 | 7, _) => Ok(parts[..3].join("-")),
            _ => Err(failed()),
        }
    };
    let regions = zones.iter().map(region_of).collect::<Result<BTreeSet<_>, _>>()?;
    match regions.len() {
        1 => regions.into_iter().next().ok_or_else(failed),
        _ => Err(failed()),
    }
}
