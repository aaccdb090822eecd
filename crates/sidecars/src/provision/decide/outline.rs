//! The request for a claim's volume: first what claim and class say, then what had to be looked up.

use std::collections::{BTreeMap, HashMap};

use cleat_api::access::{self, CsiAccessMode, MultiWriterSupport};
use cleat_api::claim::{self, BLOCK};
use cleat_api::key::Key;
use cleat_api::well_known::CSI_PARAMETER_PREFIX;
use cleat_csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use cleat_csi::v1::volume_content_source as content;
use cleat_csi::v1::{CapacityRange, CreateVolumeRequest, VolumeCapability, VolumeContentSource};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, TopologySelectorTerm};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};

use super::secrets::{self, Secrets};
use super::source::{self, SnapshotSeen, Source};
use super::topology::{self, NodeSeen};
use super::{Abilities, Choices, ClaimSeen, Obstacle, selected_node};

/// Everything that follows from claim and class alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Outline {
    pub plan: Plan,
    pub secrets: Secrets,
    /// The class of attributes whose parameters the driver is given.
    pub attributes: Option<String>,
    /// Where volumes of the class may be.
    pub allowed: Vec<TopologySelectorTerm>,
}

/// Everything that the volume's record needs beyond the driver's answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub request: CreateVolumeRequest,
    pub fs_type: Option<String>,
    pub reclaim_policy: String,
    pub mount_options: Option<Vec<String>>,
    pub provisioner: String,
    pub secrets: Secrets,
    pub read_only: bool,
    /// The claim that must stay while its volume is copied.
    pub cloned: Option<Key>,
    /// The snapshot that must stay while it is restored.
    pub restored: Option<Key>,
    /// A node was chosen, and where it is counts: if it has no room, another can be chosen.
    pub can_reschedule: bool,
}

/// What an outline names, as it was found.
#[derive(Clone, Debug, Default)]
pub struct Fetched {
    pub secret: Option<HashMap<String, String>>,
    pub snapshot: SnapshotSeen,
    pub attributes: Option<VolumeAttributesClass>,
    pub nodes: Vec<NodeSeen>,
}

pub fn outline(seen: &ClaimSeen, class: &StorageClass, can: &Abilities, choices: &Choices) -> Result<Outline, String> {
    let spec = seen.claim.spec.as_ref().ok_or("claim has no spec")?;
    let attributes = spec.volume_attributes_class_name.clone().filter(|name| !name.is_empty());
    able(seen, can, attributes.is_some())?;
    if spec.selector.is_some() {
        return Err("claim Selector is not supported".to_owned());
    }
    let requested = claim::requested_storage(&seen.claim).ok_or("claim requests no storage")?;
    let (fs_type, mut parameters) = parameters(class)?;
    let fs_type = fs_type.or_else(|| choices.default_fs_type.clone());
    let is_block = claim::claim_volume_mode(&seen.claim) == BLOCK;
    let volume_capabilities = capabilities(&seen.claim, class, fs_type.as_deref().filter(|_| !is_block), can)?;
    let name = choices.volume_name(seen.claim.metadata.uid.as_deref().unwrap_or_default());
    let empty = BTreeMap::new();
    let secrets = secrets::all(class.parameters.as_ref().unwrap_or(&empty), &name, &seen.claim)?;
    if choices.extra_create_metadata {
        let key = Key::of(&seen.claim.metadata);
        let about =
            [("pvc/name", key.name), ("pvc/namespace", key.namespace.unwrap_or_default()), ("pv/name", name.clone())];
        parameters.extend(about.map(|(key, value)| (format!("{CSI_PARAMETER_PREFIX}{key}"), value)));
    }
    let only_reads = matches!(&volume_capabilities[..], [one]
        if one.access_mode.is_some_and(|m| m.mode == CsiAccessMode::MultiNodeReaderOnly as i32));
    let request = CreateVolumeRequest {
        name,
        capacity_range: Some(CapacityRange { required_bytes: requested.to_bytes(), limit_bytes: 0 }),
        volume_capabilities,
        parameters,
        ..CreateVolumeRequest::default()
    };
    let plan = Plan {
        request,
        fs_type: fs_type.filter(|_| !is_block),
        reclaim_policy: class.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned()),
        mount_options: class.mount_options.clone(),
        provisioner: class.provisioner.clone(),
        secrets: secrets.clone(),
        read_only: only_reads && choices.publish_read_only,
        cloned: None,
        restored: None,
        can_reschedule: can.knows_topology && selected_node(&seen.claim).is_some(),
    };
    Ok(Outline { plan, secrets, attributes, allowed: class.allowed_topologies.clone().unwrap_or_default() })
}

fn able(seen: &ClaimSeen, can: &Abilities, wants_attributes: bool) -> Result<(), String> {
    let lacks = |what: &str| Err(format!("driver {:?} does not {what}", can.driver));
    match &seen.source {
        _ if !can.creates_volumes => lacks("create volumes"),
        Source::Claim { .. } if !can.clones_volumes => lacks("clone volumes"),
        Source::Snapshot(_) if !can.takes_snapshots => lacks("support snapshots"),
        _ if wants_attributes && !can.modifies_volumes => lacks("support VolumeAttributesClass"),
        _ => Ok(()),
    }
}

/// One capability for each access mode of the claim. No file system type means a block volume only if the claim says so.
fn capabilities(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    fs_type: Option<&str>,
    can: &Abilities,
) -> Result<Vec<VolumeCapability>, String> {
    let access_type = if claim::claim_volume_mode(claim) == BLOCK {
        AccessType::Block(BlockVolume {})
    } else {
        AccessType::Mount(MountVolume {
            fs_type: fs_type.unwrap_or_default().to_owned(),
            mount_flags: class.mount_options.clone().unwrap_or_default(),
            volume_mount_group: String::new(),
        })
    };
    let modes = if can.tells_writers_apart { MultiWriterSupport::Supported } else { MultiWriterSupport::Unsupported };
    let capability = |mode: &String| {
        let mode = access::to_csi_mode(mode, modes).map_err(|e| e.to_string())?;
        Ok(VolumeCapability {
            access_mode: Some(AccessMode { mode: mode as i32 }),
            access_type: Some(access_type.clone()),
        })
    };
    claim.spec.iter().flat_map(|s| s.access_modes.iter().flatten()).map(capability).collect()
}

/// Splits the class's parameters into the file system type and what is the driver's business.
fn parameters(class: &StorageClass) -> Result<(Option<String>, HashMap<String, String>), String> {
    let name = class.metadata.name.as_deref().unwrap_or_default();
    let mut fs_types = Vec::new();
    let mut passed = HashMap::new();
    for (key, value) in class.parameters.iter().flatten() {
        match key.strip_prefix(CSI_PARAMETER_PREFIX) {
            Some("fstype") => fs_types.push(value.clone()),
            Some(known) if secrets::is_known(known) => {}
            Some(_) => return Err(format!("class {name:?} has unknown parameter {key:?}")),
            None => {
                if key.eq_ignore_ascii_case("fstype") {
                    fs_types.push(value.clone());
                }
                passed.insert(key.clone(), value.clone());
            }
        }
    }
    if fs_types.len() > 1 {
        return Err(format!("class {name:?} gives the file system type more than once"));
    }
    Ok((fs_types.pop(), passed))
}

impl Outline {
    /// The request with everything that had to be looked up, or what is in its way.
    pub fn complete(
        self,
        seen: &ClaimSeen,
        fetched: Fetched,
        can: &Abilities,
        choices: &Choices,
    ) -> Result<Plan, Obstacle> {
        let mut plan = self.plan;
        let origin = match &seen.source {
            Source::Nothing | Source::Other | Source::Elsewhere => None,
            Source::Claim { name, claim, volume } => {
                let handle = source::clone_handle(&seen.claim, &can.driver, name, claim.as_deref(), volume.as_deref());
                plan.cloned = claim.as_ref().map(|c| Key::of(&c.metadata));
                Some(content::Type::Volume(content::VolumeSource { volume_id: handle.map_err(Obstacle::Later)? }))
            }
            Source::Snapshot(key) => {
                let handle = source::snapshot_handle(&seen.claim, &can.driver, key, &fetched.snapshot, choices);
                plan.restored = Some(key.clone());
                Some(content::Type::Snapshot(content::SnapshotSource { snapshot_id: handle.map_err(Obstacle::Later)? }))
            }
        };
        plan.request.volume_content_source = origin.map(|from| VolumeContentSource { r#type: Some(from) });
        if can.knows_topology {
            let name = seen.claim.metadata.name.as_deref().unwrap_or_default();
            plan.request.accessibility_requirements =
                topology::requirement(name, selected_node(&seen.claim), &self.allowed, &fetched.nodes, choices)?;
        }
        if let Some(key) = &self.secrets.provision {
            let missing = || Obstacle::Later(format!("error getting secret {key}: not found"));
            plan.request.secrets = fetched.secret.ok_or_else(missing)?;
        }
        if let Some(name) = &self.attributes {
            let missing = || Obstacle::Later(format!("volumeattributesclass.storage.k8s.io {name:?} not found"));
            let attributes = fetched.attributes.ok_or_else(missing)?;
            if attributes.driver_name != can.driver {
                let theirs = attributes.driver_name;
                return Err(Obstacle::Final(format!("VolumeAttributesClass {name:?} is of driver {theirs:?}")));
            }
            plan.request.mutable_parameters = attributes.parameters.into_iter().flatten().collect();
        }
        Ok(plan)
    }
}
