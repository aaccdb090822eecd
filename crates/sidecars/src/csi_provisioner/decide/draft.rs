//! Builds the CreateVolume request of a claim: first a draft from claim and class, then the plan with the objects that had
//! to be read from the API server.

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

use super::secrets::{self, SecretRefs};
use super::source::{self, DataSource, RestoreSource};
use super::topology::{self, NodeTopology};
use super::{ClaimSnapshot, DriverCapabilities, PlanError, ProvisionPolicy, selected_node};

/// What follows from claim and class alone.
#[derive(Clone, Debug, PartialEq)]
pub struct ProvisionDraft {
    pub plan: ProvisionPlan,
    /// The name of the VolumeAttributesClass whose parameters go into the request.
    pub attributes_class: Option<String>,
    /// `allowedTopologies` of the class.
    pub allowed_topologies: Vec<TopologySelectorTerm>,
}

/// The request, and what the PersistentVolume needs beside the driver's reply to it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProvisionPlan {
    pub request: CreateVolumeRequest,
    pub fs_type: Option<String>,
    pub reclaim_policy: String,
    pub mount_options: Option<Vec<String>>,
    pub provisioner: String,
    pub secrets: SecretRefs,
    pub read_only: bool,
    /// The claim that must not be deleted while its volume is copied.
    pub clone_source: Option<Key>,
    /// The VolumeSnapshot that must not be deleted while it is restored.
    pub restore_source: Option<Key>,
    /// A node is selected and the driver supports topology: if the node has no capacity, another one can be selected.
    pub can_reschedule: bool,
}

/// The objects that a draft names. Objects that do not exist are `None`.
#[derive(Clone, Debug, Default)]
pub struct FetchedObjects {
    pub secret: Option<HashMap<String, String>>,
    pub snapshot: RestoreSource,
    pub attributes_class: Option<VolumeAttributesClass>,
    pub nodes: Vec<NodeTopology>,
}

pub fn draft(
    snapshot: &ClaimSnapshot,
    class: &StorageClass,
    driver: &DriverCapabilities,
    policy: &ProvisionPolicy,
) -> Result<ProvisionDraft, String> {
    let spec = snapshot.claim.spec.as_ref().ok_or("claim has no spec")?;
    let attributes_class = spec.volume_attributes_class_name.clone().filter(|name| !name.is_empty());
    check_capabilities(snapshot, driver, attributes_class.is_some())?;
    if spec.selector.is_some() {
        return Err("claim Selector is not supported".to_owned());
    }
    let requested = claim::requested_storage(&snapshot.claim).ok_or("claim requests no storage")?;
    let (fs_type, mut parameters) = parameters(class)?;
    let fs_type = fs_type.or_else(|| policy.default_fs_type.clone());
    let is_block = claim::claim_volume_mode(&snapshot.claim) == BLOCK;
    let volume_capabilities =
        volume_capabilities(&snapshot.claim, class, fs_type.as_deref().filter(|_| !is_block), driver)?;
    let name = policy.volume_name(snapshot.claim.metadata.uid.as_deref().unwrap_or_default());
    let empty = BTreeMap::new();
    let secrets = secrets::resolve_all(class.parameters.as_ref().unwrap_or(&empty), &name, &snapshot.claim)?;
    if policy.extra_create_metadata {
        let key = Key::of(&snapshot.claim.metadata);
        let metadata =
            [("pvc/name", key.name), ("pvc/namespace", key.namespace.unwrap_or_default()), ("pv/name", name.clone())];
        parameters.extend(metadata.map(|(key, value)| (format!("{CSI_PARAMETER_PREFIX}{key}"), value)));
    }
    let reads_only = matches!(&volume_capabilities[..], [one]
        if one.access_mode.is_some_and(|m| m.mode == CsiAccessMode::MultiNodeReaderOnly as i32));
    let request = CreateVolumeRequest {
        name,
        capacity_range: Some(CapacityRange { required_bytes: requested.to_bytes(), limit_bytes: 0 }),
        volume_capabilities,
        parameters,
        ..CreateVolumeRequest::default()
    };
    let plan = ProvisionPlan {
        request,
        fs_type: fs_type.filter(|_| !is_block),
        reclaim_policy: class.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned()),
        mount_options: class.mount_options.clone(),
        provisioner: class.provisioner.clone(),
        secrets,
        read_only: reads_only && policy.publish_read_only,
        clone_source: None,
        restore_source: None,
        can_reschedule: driver.supports_topology && selected_node(&snapshot.claim).is_some(),
    };
    let allowed_topologies = class.allowed_topologies.clone().unwrap_or_default();
    Ok(ProvisionDraft { plan, attributes_class, allowed_topologies })
}

fn check_capabilities(
    snapshot: &ClaimSnapshot,
    driver: &DriverCapabilities,
    wants_attributes: bool,
) -> Result<(), String> {
    let lacks = |what: &str| Err(format!("driver {:?} does not {what}", driver.name));
    match &snapshot.source {
        _ if !driver.creates_volumes => lacks("create volumes"),
        DataSource::Claim { .. } if !driver.clones_volumes => lacks("clone volumes"),
        DataSource::Snapshot(_) if !driver.takes_snapshots => lacks("support snapshots"),
        _ if wants_attributes && !driver.modifies_volumes => lacks("support VolumeAttributesClass"),
        _ => Ok(()),
    }
}

/// One capability for each access mode of the claim.
fn volume_capabilities(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    fs_type: Option<&str>,
    driver: &DriverCapabilities,
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
    let modes =
        if driver.single_node_multi_writer { MultiWriterSupport::Supported } else { MultiWriterSupport::Unsupported };
    let capability = |mode: &String| {
        let mode = access::to_csi_mode(mode, modes).map_err(|e| e.to_string())?;
        Ok(VolumeCapability {
            access_mode: Some(AccessMode { mode: mode as i32 }),
            access_type: Some(access_type.clone()),
        })
    };
    claim.spec.iter().flat_map(|s| s.access_modes.iter().flatten()).map(capability).collect()
}

/// Splits the class's parameters into the file system type and the parameters for the driver. Parameters that name secrets
/// go to neither.
fn parameters(class: &StorageClass) -> Result<(Option<String>, HashMap<String, String>), String> {
    let name = class.metadata.name.as_deref().unwrap_or_default();
    let mut fs_types = Vec::new();
    let mut for_driver = HashMap::new();
    for (key, value) in class.parameters.iter().flatten() {
        match key.strip_prefix(CSI_PARAMETER_PREFIX) {
            Some("fstype") => fs_types.push(value.clone()),
            Some(key) if secrets::is_secret_parameter(key) => {}
            Some(_) => return Err(format!("class {name:?} has unknown parameter {key:?}")),
            None => {
                if key.eq_ignore_ascii_case("fstype") {
                    fs_types.push(value.clone());
                }
                for_driver.insert(key.clone(), value.clone());
            }
        }
    }
    if fs_types.len() > 1 {
        return Err(format!("class {name:?} gives the file system type more than once"));
    }
    Ok((fs_types.pop(), for_driver))
}

impl ProvisionDraft {
    /// Fails if an object that the draft names is missing or unsuitable.
    pub fn complete(
        self,
        snapshot: &ClaimSnapshot,
        fetched: FetchedObjects,
        driver: &DriverCapabilities,
        policy: &ProvisionPolicy,
    ) -> Result<ProvisionPlan, PlanError> {
        let mut plan = self.plan;
        let content = match &snapshot.source {
            DataSource::Unset | DataSource::OtherKind | DataSource::OtherNamespace => None,
            DataSource::Claim { name, claim, volume } => {
                let handle =
                    source::clone_handle(&snapshot.claim, &driver.name, name, claim.as_deref(), volume.as_deref());
                plan.clone_source = claim.as_ref().map(|c| Key::of(&c.metadata));
                Some(content::Type::Volume(content::VolumeSource { volume_id: handle.map_err(PlanError::Later)? }))
            }
            DataSource::Snapshot(key) => {
                let handle = source::snapshot_handle(&snapshot.claim, &driver.name, key, &fetched.snapshot, policy);
                plan.restore_source = Some(key.clone());
                Some(content::Type::Snapshot(content::SnapshotSource {
                    snapshot_id: handle.map_err(PlanError::Later)?,
                }))
            }
        };
        plan.request.volume_content_source = content.map(|content| VolumeContentSource { r#type: Some(content) });
        if driver.supports_topology {
            let name = snapshot.claim.metadata.name.as_deref().unwrap_or_default();
            plan.request.accessibility_requirements = topology::requirement(
                name,
                selected_node(&snapshot.claim),
                &self.allowed_topologies,
                &fetched.nodes,
                policy,
            )?;
        }
        if let Some(key) = &plan.secrets.provision {
            let missing = || PlanError::Later(format!("error getting secret {key}: not found"));
            plan.request.secrets = fetched.secret.ok_or_else(missing)?;
        }
        if let Some(name) = &self.attributes_class {
            let missing = || PlanError::Later(format!("volumeattributesclass.storage.k8s.io {name:?} not found"));
            let class = fetched.attributes_class.ok_or_else(missing)?;
            if class.driver_name != driver.name {
                let owner = class.driver_name;
                return Err(PlanError::Final(format!("VolumeAttributesClass {name:?} is of driver {owner:?}")));
            }
            plan.request.mutable_parameters = class.parameters.into_iter().flatten().collect();
        }
        Ok(plan)
    }
}
