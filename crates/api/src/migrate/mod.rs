//! Volumes of the cloud plugins that Kubernetes once had inside, as volumes of the CSI drivers that took over.
//!
//! Objects in the API keep their old form; everybody who acts on them looks at them through [`volume`] or [`inline`].
//! A volume that is of CSI already, or of no plugin that moved, comes back as it is.

mod provision;
mod source;

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, NodeSelectorRequirement, PersistentVolume, Volume};

use crate::access::{READ_ONLY_MANY, READ_WRITE_ONCE};

pub use provision::{back, class};

/// Who took over from whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The plugin's old name, as classes and annotations have it.
    pub plugin: &'static str,
    pub driver: &'static str,
    /// What the driver calls a zone, where it has zones.
    pub zone: Option<&'static str>,
}

pub const AWS_EBS: Moved = moved("kubernetes.io/aws-ebs", "ebs.csi.aws.com", Some("topology.ebs.csi.aws.com/zone"));
pub const GCE_PD: Moved = moved("kubernetes.io/gce-pd", "pd.csi.storage.gke.io", Some("topology.gke.io/zone"));
pub const AZURE_DISK: Moved =
    moved("kubernetes.io/azure-disk", "disk.csi.azure.com", Some("topology.disk.csi.azure.com/zone"));
pub const AZURE_FILE: Moved = moved("kubernetes.io/azure-file", "file.csi.azure.com", None);
pub const CINDER: Moved =
    moved("kubernetes.io/cinder", "cinder.csi.openstack.org", Some("topology.cinder.csi.openstack.org/zone"));
pub const VSPHERE: Moved = moved("kubernetes.io/vsphere-volume", "csi.vsphere.vmware.com", None);
pub const PORTWORX: Moved = moved("kubernetes.io/portworx-volume", "pxd.portworx.com", None);

pub const ALL: [Moved; 7] = [AWS_EBS, GCE_PD, AZURE_DISK, AZURE_FILE, CINDER, VSPHERE, PORTWORX];

const fn moved(plugin: &'static str, driver: &'static str, zone: Option<&'static str>) -> Moved {
    Moved { plugin, driver, zone }
}

const ZONES: [&str; 2] = ["failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"];

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

/// The driver that took over from an old plugin.
pub fn driver_of(plugin: &str) -> Option<&'static str> {
    ALL.iter().find(|moved| moved.plugin == plugin).map(|moved| moved.driver)
}

/// The old plugin that a driver took over from.
pub fn plugin_of(driver: &str) -> Option<&'static str> {
    ALL.iter().find(|moved| moved.driver == driver).map(|moved| moved.plugin)
}

/// The volume as its CSI driver is to see it.
pub fn volume(volume: &PersistentVolume) -> Result<Cow<'_, PersistentVolume>, MigrateError> {
    let Some((moved, csi)) = source::of_volume(volume)? else { return Ok(Cow::Borrowed(volume)) };
    let mut translated = volume.clone();
    let spec = translated.spec.get_or_insert_default();
    source::clear(spec);
    spec.csi = Some(csi);
    if moved == GCE_PD {
        spec.access_modes = spec.access_modes.as_deref().map(one_writer);
    }
    if let Some(zone) = moved.zone {
        let terms = spec.node_affinity.iter_mut().filter_map(|affinity| affinity.required.as_mut());
        let terms = terms.flat_map(|required| required.node_selector_terms.iter_mut());
        terms.flat_map(|term| term.match_expressions.iter_mut().flatten()).for_each(|rule| rename(rule, zone));
    }
    Ok(Cow::Owned(translated))
}

/// A pod's own volume of an old plugin, as a PersistentVolume that nobody stored. `None` for all other volumes.
pub fn inline(volume: &Volume, namespace: &str) -> Result<Option<PersistentVolume>, MigrateError> {
    source::of_pod(volume, namespace)
}

/// What there is to be attached; `None` for a volume that no CSI driver serves.
pub fn csi(seen: &PersistentVolume) -> Result<Option<Cow<'_, CSIPersistentVolumeSource>>, MigrateError> {
    if let Some(csi) = seen.spec.as_ref().and_then(|spec| spec.csi.as_ref()) {
        return Ok(Some(Cow::Borrowed(csi)));
    }
    Ok(source::of_volume(seen)?.map(|(_, csi)| Cow::Owned(csi)))
}

/// The handle with what only the node tells: project and zone of a GCE disk that was named without them.
pub fn repair_handle(driver: &str, handle: &str, node_id: &str) -> Result<String, MigrateError> {
    if driver != GCE_PD.driver {
        return Ok(handle.to_owned());
    }
    let failed = || MigrateError::Repair { handle: handle.to_owned(), node: node_id.to_owned() };
    let ["projects", project, sort, place, "disks", disk] = handle.split('/').collect::<Vec<_>>()[..] else {
        return Err(failed());
    };
    if project != source::UNSPECIFIED {
        return Ok(handle.to_owned());
    }
    let ["projects", project, "zones", zone, "instances", _] = node_id.split('/').collect::<Vec<_>>()[..] else {
        return Err(failed());
    };
    let place = match (sort, place) {
        ("zones", source::UNSPECIFIED) => zone.to_owned(),
        ("regions", source::UNSPECIFIED) => source::region(&[zone])?,
        ("zones" | "regions", place) => place.to_owned(),
        _ => return Err(failed()),
    };
    Ok(format!("projects/{project}/{sort}/{place}/disks/{disk}"))
}

/// The old plugin attached for one writer whatever the modes said, and the driver takes them at their word.
fn one_writer(modes: &[String]) -> Vec<String> {
    let only_readers = !modes.is_empty() && modes.iter().all(|mode| mode == READ_ONLY_MANY);
    vec![if only_readers { READ_ONLY_MANY } else { READ_WRITE_ONCE }.to_owned()]
}

fn rename(rule: &mut NodeSelectorRequirement, zone: &str) {
    if ZONES.contains(&rule.key.as_str()) {
        zone.clone_into(&mut rule.key);
    }
}

#[cfg(test)]
mod tests;
