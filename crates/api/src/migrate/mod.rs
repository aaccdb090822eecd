//! CSI migration: translates volumes of the former in-tree cloud plugins to volumes of the CSI drivers that replaced them.
//!
//! Objects in the API keep their in-tree form. A component that acts on one translates it first, with [`translate_volume`],
//! [`translate_inline_volume`] or [`csi_source`]. A CSI volume, and a volume of a plugin that was not migrated, is returned
//! unchanged.

mod provision;
mod source;

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, NodeSelectorRequirement, PersistentVolume, Volume};

use crate::access::{READ_ONLY_MANY, READ_WRITE_ONCE};

pub use provision::{to_in_tree_volume, translate_class};

/// An in-tree plugin and the CSI driver that replaced it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigratedPlugin {
    /// The plugin's name in storage classes and annotations.
    pub plugin: &'static str,
    pub driver: &'static str,
    /// The driver's topology key for zones, if zones are translated.
    pub zone_key: Option<&'static str>,
}

pub const AWS_EBS: MigratedPlugin =
    migrated("kubernetes.io/aws-ebs", "ebs.csi.aws.com", Some("topology.ebs.csi.aws.com/zone"));
pub const GCE_PD: MigratedPlugin =
    migrated("kubernetes.io/gce-pd", "pd.csi.storage.gke.io", Some("topology.gke.io/zone"));
pub const AZURE_DISK: MigratedPlugin =
    migrated("kubernetes.io/azure-disk", "disk.csi.azure.com", Some("topology.disk.csi.azure.com/zone"));
pub const AZURE_FILE: MigratedPlugin = migrated("kubernetes.io/azure-file", "file.csi.azure.com", None);
pub const CINDER: MigratedPlugin =
    migrated("kubernetes.io/cinder", "cinder.csi.openstack.org", Some("topology.cinder.csi.openstack.org/zone"));
pub const VSPHERE: MigratedPlugin = migrated("kubernetes.io/vsphere-volume", "csi.vsphere.vmware.com", None);
pub const PORTWORX: MigratedPlugin = migrated("kubernetes.io/portworx-volume", "pxd.portworx.com", None);

pub const MIGRATED_PLUGINS: [MigratedPlugin; 7] = [AWS_EBS, GCE_PD, AZURE_DISK, AZURE_FILE, CINDER, VSPHERE, PORTWORX];

const fn migrated(plugin: &'static str, driver: &'static str, zone_key: Option<&'static str>) -> MigratedPlugin {
    MigratedPlugin { plugin, driver, zone_key }
}

/// The labels for the zone of a node or volume: the beta one and the current one.
const ZONE_LABELS: [&str; 2] = ["failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"];

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MigrateError {
    #[error("{0:?} does not name an EBS volume")]
    EbsVolume(String),
    #[error("zones {0:?} are not in one region")]
    Region(String),
    #[error("volume handle {handle:?} cannot be completed from node id {node:?}")]
    Repair { handle: String, node: String },
    #[error("a class cannot have both allowed topologies and the parameter zone or zones")]
    ZonesTwice,
    #[error("volume handle {0:?} is not of the form that the old plugin's volumes have")]
    Handle(String),
    #[error("partition {0:?} is not a number")]
    Partition(String),
}

/// The CSI driver that replaced an in-tree plugin; `None` if it was not migrated.
pub fn driver_of(plugin: &str) -> Option<&'static str> {
    MIGRATED_PLUGINS.iter().find(|migrated| migrated.plugin == plugin).map(|migrated| migrated.driver)
}

/// The in-tree plugin that a CSI driver replaced.
pub fn plugin_of(driver: &str) -> Option<&'static str> {
    MIGRATED_PLUGINS.iter().find(|migrated| migrated.driver == driver).map(|migrated| migrated.plugin)
}

/// The volume with a CSI source in place of its in-tree source. Access modes and node affinity are translated with it.
pub fn translate_volume(volume: &PersistentVolume) -> Result<Cow<'_, PersistentVolume>, MigrateError> {
    let Some((migrated, csi)) = source::translate_source(volume)? else { return Ok(Cow::Borrowed(volume)) };
    let mut translated = volume.clone();
    let spec = translated.spec.get_or_insert_default();
    source::clear_in_tree(spec);
    spec.csi = Some(csi);
    if migrated == GCE_PD {
        spec.access_modes = spec.access_modes.as_deref().map(single_writer_modes);
    }
    if let Some(zone_key) = migrated.zone_key {
        let terms = spec.node_affinity.iter_mut().filter_map(|affinity| affinity.required.as_mut());
        let terms = terms.flat_map(|required| required.node_selector_terms.iter_mut());
        terms
            .flat_map(|term| term.match_expressions.iter_mut().flatten())
            .for_each(|rule| rename_zone_label(rule, zone_key));
    }
    Ok(Cow::Owned(translated))
}

/// An in-tree volume of a pod's spec, as a PersistentVolume that exists only in memory. `None` for all other volumes.
pub fn translate_inline_volume(volume: &Volume, namespace: &str) -> Result<Option<PersistentVolume>, MigrateError> {
    source::translate_pod_volume(volume, namespace)
}

/// The CSI source of the volume, translated if necessary; `None` if no CSI driver serves it.
pub fn csi_source(volume: &PersistentVolume) -> Result<Option<Cow<'_, CSIPersistentVolumeSource>>, MigrateError> {
    if let Some(csi) = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref()) {
        return Ok(Some(Cow::Borrowed(csi)));
    }
    Ok(source::translate_source(volume)?.map(|(_, csi)| Cow::Owned(csi)))
}

/// Completes the handle of a GCE disk whose project, zone or region is unspecified, from the node's id. Other handles are
/// returned unchanged.
pub fn repair_handle(driver: &str, handle: &str, node_id: &str) -> Result<String, MigrateError> {
    if driver != GCE_PD.driver {
        return Ok(handle.to_owned());
    }
    let failed = || MigrateError::Repair { handle: handle.to_owned(), node: node_id.to_owned() };
    let ["projects", project, scope, location, "disks", disk] = handle.split('/').collect::<Vec<_>>()[..] else {
        return Err(failed());
    };
    if project != source::UNSPECIFIED {
        return Ok(handle.to_owned());
    }
    let ["projects", project, "zones", zone, "instances", _] = node_id.split('/').collect::<Vec<_>>()[..] else {
        return Err(failed());
    };
    let location = match (scope, location) {
        ("zones", source::UNSPECIFIED) => zone.to_owned(),
        ("regions", source::UNSPECIFIED) => source::gce_region(&[zone])?,
        ("zones" | "regions", location) => location.to_owned(),
        _ => return Err(failed()),
    };
    Ok(format!("projects/{project}/{scope}/{location}/disks/{disk}"))
}

/// The in-tree plugin ignored the access modes and attached to one writer. The driver honours them, so that they are reduced to
/// what the plugin did.
fn single_writer_modes(modes: &[String]) -> Vec<String> {
    let is_read_only = !modes.is_empty() && modes.iter().all(|mode| mode == READ_ONLY_MANY);
    vec![if is_read_only { READ_ONLY_MANY } else { READ_WRITE_ONCE }.to_owned()]
}

fn rename_zone_label(rule: &mut NodeSelectorRequirement, zone_key: &str) {
    if ZONE_LABELS.contains(&rule.key.as_str()) {
        zone_key.clone_into(&mut rule.key);
    }
}

#[cfg(test)]
mod tests;
