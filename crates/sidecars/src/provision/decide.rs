//! Should a claim get a volume now, and with what request? May a volume be deleted? Pure.

use std::collections::HashMap;
use std::sync::Arc;

use cleat_api::access::{self, SingleNodeModes};
use cleat_api::claim::{self, BLOCK, claim_class, volume_phase, waits_for_consumer};
use cleat_api::key::{Key, Meta as _};
use cleat_api::keys::{CSI_PARAMETER_PREFIX, annotation, finalizer};
use cleat_api::names;
use cleat_csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use cleat_csi::v1::volume_content_source as content;
use cleat_csi::v1::{CapacityRange, CreateVolumeRequest, VolumeCapability, VolumeContentSource};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

#[derive(Clone, Debug)]
pub struct ClaimSeen {
    pub claim: Arc<PersistentVolumeClaim>,
    pub class: Option<Arc<StorageClass>>,
    /// The volume of this claim is recorded already.
    pub volume_exists: bool,
    /// An earlier call whose outcome is not known.
    pub pending: Option<Plan>,
    pub source: Source,
    pub driver: String,
    pub creates_volumes: bool,
    pub clones_volumes: bool,
    pub tells_writers_apart: bool,
}

/// What the volume is to be filled with.
#[derive(Clone, Debug, Default)]
pub enum Source {
    #[default]
    Nothing,
    /// Another claim's volume, as far as they exist.
    Claim {
        name: String,
        claim: Option<Arc<PersistentVolumeClaim>>,
        volume: Option<Arc<PersistentVolume>>,
    },
    Snapshot,
    /// A kind that somebody else makes volumes from.
    Other,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ClaimDecision {
    /// Another driver's, or served already.
    Nothing,
    Wait(Wait),
    /// The claim or its class asks for something that cannot be had; trying again helps only when they change.
    Refuse(String),
    /// Something it needs is not there yet, or not in order; tried again with backoff.
    TryLater(String),
    Provision(Box<Plan>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    ClassMissing,
    ForFirstConsumer,
    /// An external populator makes and fills the volume.
    ForPopulator,
}

/// Everything that the volume's record needs beyond the driver's answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub request: CreateVolumeRequest,
    pub fs_type: Option<String>,
    pub reclaim_policy: String,
    pub mount_options: Option<Vec<String>>,
    pub provisioner: String,
    /// The claim that must stay while its volume is copied.
    pub cloned: Option<Key>,
}

pub fn claim(seen: &ClaimSeen) -> ClaimDecision {
    if let (false, Some(plan)) = (seen.volume_exists, &seen.pending) {
        return ClaimDecision::Provision(Box::new(plan.clone()));
    }
    let meta = &seen.claim.metadata;
    let asked = [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA]
        .into_iter()
        .find_map(|key| meta.annotation(key));
    if asked != Some(&seen.driver) || claim::volume_name(&seen.claim).is_some() || seen.volume_exists {
        return ClaimDecision::Nothing;
    }
    let Some(class) = &seen.class else { return ClaimDecision::Wait(Wait::ClassMissing) };
    if class.provisioner != seen.driver {
        return ClaimDecision::Nothing;
    }
    if waits_for_consumer(class) && meta.annotation(annotation::SELECTED_NODE).is_none() {
        return ClaimDecision::Wait(Wait::ForFirstConsumer);
    }
    let mut plan = match plan(seen, class) {
        Ok(plan) => plan,
        Err(why) => return ClaimDecision::Refuse(why),
    };
    match &seen.source {
        Source::Nothing => {}
        Source::Other => return ClaimDecision::Wait(Wait::ForPopulator),
        Source::Snapshot => return ClaimDecision::Refuse("restoring from snapshots is not supported".to_owned()),
        Source::Claim { .. } if !seen.clones_volumes => {
            return ClaimDecision::Refuse(format!("driver {:?} does not clone volumes", seen.driver));
        }
        Source::Claim { name, claim, volume } => match origin(seen, name, claim.as_deref(), volume.as_deref()) {
            Ok(handle) => {
                plan.cloned = claim.as_ref().map(|c| Key::of(&c.metadata));
                plan.request.volume_content_source = Some(VolumeContentSource {
                    r#type: Some(content::Type::Volume(content::VolumeSource { volume_id: handle })),
                });
            }
            Err(why) => return ClaimDecision::TryLater(why),
        },
    }
    ClaimDecision::Provision(Box::new(plan))
}

/// The handle of the volume to clone, if it can be cloned for this claim now.
fn origin(
    seen: &ClaimSeen,
    name: &str,
    source: Option<&PersistentVolumeClaim>,
    volume: Option<&PersistentVolume>,
) -> Result<String, String> {
    let source = source.ok_or_else(|| format!("claim in dataSource not found: {name:?}"))?;
    if claim::claim_phase(source) != "Bound" {
        return Err(format!("the PVC DataSource {name} must be bound to clone it"));
    }
    if source.metadata.is_deleting() {
        return Err(format!("the PVC DataSource {name} is currently being deleted"));
    }
    if claim_class(source).is_none() {
        return Err(format!("the source PVC {name} has no storage class"));
    }
    if claim::requested(&seen.claim) < claim::requested(source) {
        return Err(format!("new PVC request must be greater than or equal in size to the source PVC {name}"));
    }
    if claim::claim_mode(&seen.claim) != claim::claim_mode(source) {
        return Err(format!("the source PVC {name} has another volume mode"));
    }
    let volume = volume.ok_or_else(|| format!("the volume of the source PVC {name} is not found"))?;
    let csi = volume.spec.as_ref().and_then(|s| s.csi.as_ref()).filter(|csi| csi.driver == seen.driver);
    let csi = csi.ok_or_else(|| format!("the source PVC {name} is not a volume of driver {:?}", seen.driver))?;
    if !claim::is_bound_pair(volume, source) || volume_phase(volume) != "Bound" {
        return Err(format!("the volume of the source PVC {name} is not bound to it"));
    }
    Ok(csi.volume_handle.clone())
}

/// What becomes of our hold on a claim that others are cloned from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldDecision {
    Nothing,
    Keep,
    LetGo,
}

/// `clones` are the claims of its namespace that name it as their source.
pub fn hold(source: &PersistentVolumeClaim, clones: &[Arc<PersistentVolumeClaim>]) -> HoldDecision {
    if !source.metadata.is_deleting() || !source.metadata.has_finalizer(finalizer::CLONING) {
        return HoldDecision::Nothing;
    }
    let unfinished = clones.iter().any(|c| claim::claim_phase(c) == "Pending");
    if unfinished { HoldDecision::Keep } else { HoldDecision::LetGo }
}

fn plan(seen: &ClaimSeen, class: &StorageClass) -> Result<Plan, String> {
    let spec = seen.claim.spec.as_ref().ok_or("claim has no spec")?;
    if !seen.creates_volumes {
        return Err(format!("driver {:?} does not create volumes", seen.driver));
    }
    if spec.selector.is_some() {
        return Err("claim Selector is not supported".to_owned());
    }
    let requested = claim::requested(&seen.claim).ok_or("claim requests no storage")?;
    let (fs_type, parameters) = parameters(class)?;
    let is_block = claim::claim_mode(&seen.claim) == BLOCK;
    let mount_options = class.mount_options.clone();
    let access_type = if is_block {
        AccessType::Block(BlockVolume {})
    } else {
        AccessType::Mount(MountVolume {
            fs_type: fs_type.clone().unwrap_or_default(),
            mount_flags: mount_options.clone().unwrap_or_default(),
            volume_mount_group: String::new(),
        })
    };
    let modes = if seen.tells_writers_apart { SingleNodeModes::Distinguished } else { SingleNodeModes::One };
    let capability = |mode: &String| {
        let mode = access::single(mode, modes).map_err(|e| e.to_string())?;
        Ok::<_, String>(VolumeCapability {
            access_mode: Some(AccessMode { mode: mode as i32 }),
            access_type: Some(access_type.clone()),
        })
    };
    let volume_capabilities = spec.access_modes.iter().flatten().map(capability).collect::<Result<_, _>>()?;
    let request = CreateVolumeRequest {
        name: names::provisioned_volume(seen.claim.metadata.uid()),
        capacity_range: Some(CapacityRange { required_bytes: requested.to_bytes(), limit_bytes: 0 }),
        volume_capabilities,
        parameters,
        ..CreateVolumeRequest::default()
    };
    Ok(Plan {
        request,
        fs_type: fs_type.filter(|_| !is_block),
        reclaim_policy: class.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned()),
        mount_options,
        provisioner: class.provisioner.clone(),
        cloned: None,
    })
}

/// Splits the class's parameters into the file system type and what is the driver's business.
fn parameters(class: &StorageClass) -> Result<(Option<String>, HashMap<String, String>), String> {
    let mut fs_types = Vec::new();
    let mut passed = HashMap::new();
    for (key, value) in class.parameters.iter().flatten() {
        match key.strip_prefix(CSI_PARAMETER_PREFIX) {
            Some("fstype") => fs_types.push(value.clone()),
            Some(_) => return Err(format!("class {:?} has unknown parameter {key:?}", claim_name(class))),
            None => {
                if key.eq_ignore_ascii_case("fstype") {
                    fs_types.push(value.clone());
                }
                passed.insert(key.clone(), value.clone());
            }
        }
    }
    if fs_types.len() > 1 {
        return Err(format!("class {:?} gives the file system type more than once", claim_name(class)));
    }
    Ok((fs_types.pop(), passed))
}

fn claim_name(class: &StorageClass) -> &str {
    class.metadata.name.as_deref().unwrap_or_default()
}

#[derive(Clone, Debug)]
pub struct VolumeSeen {
    pub volume: Arc<PersistentVolume>,
    /// Nodes that a VolumeAttachment of this volume names.
    pub attached_to: Vec<String>,
    pub driver: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeDecision {
    Nothing,
    /// Hold the record, so that it cannot go before the volume.
    Hold,
    /// The volume is to be kept: the record may go when it likes.
    Release,
    Delete {
        handle: String,
    },
    /// Released, and still attached to this node.
    WaitForDetach(String),
}

pub fn volume(seen: &VolumeSeen) -> VolumeDecision {
    let meta = &seen.volume.metadata;
    let Some(spec) = &seen.volume.spec else { return VolumeDecision::Nothing };
    let Some(csi) = spec.csi.as_ref().filter(|csi| csi.driver == seen.driver) else {
        return VolumeDecision::Nothing;
    };
    if meta.annotation(annotation::PROVISIONED_BY).is_some_and(|by| by != seen.driver) {
        return VolumeDecision::Nothing;
    }
    let held = meta.has_finalizer(finalizer::PROVISIONER);
    let deletes = spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete");
    match volume_phase(&seen.volume) {
        _ if held && !deletes => VolumeDecision::Release,
        "Released" if deletes && (held || !meta.is_deleting()) => match seen.attached_to.first() {
            Some(node) => VolumeDecision::WaitForDetach(node.clone()),
            None => VolumeDecision::Delete { handle: csi.volume_handle.clone() },
        },
        "Bound" if deletes && !held && !meta.is_deleting() => VolumeDecision::Hold,
        _ => VolumeDecision::Nothing,
    }
}

/// The class a recorded volume names: the one its claim asked for.
pub(super) fn recorded_class(claim: &PersistentVolumeClaim) -> Option<String> {
    claim_class(claim).map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::build::{self, DRIVER};

    fn asked(class: &str) -> PersistentVolumeClaim {
        let mut claim = build::claim("ns", "c", Some(class), "5Gi");
        build::annotate(&mut claim.metadata, annotation::STORAGE_PROVISIONER, DRIVER);
        claim
    }

    fn seen(claim: PersistentVolumeClaim, class: Option<StorageClass>) -> ClaimSeen {
        ClaimSeen {
            claim: Arc::new(claim),
            class: class.map(Arc::new),
            volume_exists: false,
            pending: None,
            source: Source::Nothing,
            driver: DRIVER.to_owned(),
            creates_volumes: true,
            clones_volumes: true,
            tells_writers_apart: false,
        }
    }

    fn fast() -> Option<StorageClass> {
        Some(build::class("fast", DRIVER))
    }

    fn with(parameters: &[(&str, &str)]) -> Option<StorageClass> {
        let mut class = build::class("fast", DRIVER);
        let pairs = parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        class.parameters = Some(pairs.collect());
        Some(class)
    }

    #[test]
    fn a_claim_is_served_by_the_driver_it_names_and_once() {
        let mut waiting = build::class("fast", DRIVER);
        waiting.volume_binding_mode = Some(claim::WAIT_FOR_FIRST_CONSUMER.to_owned());
        let mut pointing = asked("fast");
        pointing.spec.as_mut().unwrap().volume_name = Some("v".to_owned());
        let mut selecting = asked("fast");
        selecting.spec.as_mut().unwrap().selector = Some(Default::default());
        let mut odd = asked("fast");
        odd.spec.as_mut().unwrap().access_modes = Some(vec!["Sometimes".to_owned()]);
        let refuse = |why: &str| ClaimDecision::Refuse(why.to_owned());
        for (case, seen, want) in [
            ("nobody named", seen(build::claim("ns", "c", Some("fast"), "1Gi"), fast()), ClaimDecision::Nothing),
            (
                "another driver's",
                ClaimSeen { driver: "other".to_owned(), ..seen(asked("fast"), fast()) },
                ClaimDecision::Nothing,
            ),
            ("has its volume", seen(pointing, fast()), ClaimDecision::Nothing),
            (
                "its volume is recorded",
                ClaimSeen { volume_exists: true, ..seen(asked("fast"), fast()) },
                ClaimDecision::Nothing,
            ),
            ("its class is gone", seen(asked("fast"), None), ClaimDecision::Wait(Wait::ClassMissing)),
            ("no consumer yet", seen(asked("fast"), Some(waiting)), ClaimDecision::Wait(Wait::ForFirstConsumer)),
            (
                "a selector cannot be provisioned for",
                seen(selecting, fast()),
                refuse("claim Selector is not supported"),
            ),
            ("a mode nobody knows", seen(odd, fast()), refuse("access modes [Sometimes] cannot be offered together")),
            (
                "a driver without volumes of its own",
                ClaimSeen { creates_volumes: false, ..seen(asked("fast"), fast()) },
                refuse("driver \"block.cleat.dev\" does not create volumes"),
            ),
            (
                "a parameter meant for a provisioner, which it does not know",
                seen(asked("fast"), with(&[("csi.storage.k8s.io/nonsense", "x")])),
                refuse("class \"fast\" has unknown parameter \"csi.storage.k8s.io/nonsense\""),
            ),
            (
                "two file system types",
                seen(asked("fast"), with(&[("csi.storage.k8s.io/fstype", "xfs"), ("fsType", "ext4")])),
                refuse("class \"fast\" gives the file system type more than once"),
            ),
        ] {
            assert_eq!(claim(&seen), want, "{case}");
        }
    }

    #[test]
    fn a_clone_is_made_from_a_bound_volume_of_the_same_driver() {
        let pair = || build::bound(build::claim("ns", "src", Some("fast"), "5Gi"), build::volume("v", "fast", "5Gi"));
        let from = |claim: Option<PersistentVolumeClaim>, volume: Option<PersistentVolume>| {
            let source =
                Source::Claim { name: "src".to_owned(), claim: claim.map(Arc::new), volume: volume.map(Arc::new) };
            ClaimSeen { source, ..seen(asked("fast"), fast()) }
        };
        let (source, volume) = pair();
        let ClaimDecision::Provision(plan) = claim(&from(Some(source.clone()), Some(volume.clone()))) else {
            panic!("refused")
        };
        let origin = plan.request.volume_content_source.unwrap().r#type.unwrap();
        assert!(matches!(origin, content::Type::Volume(v) if v.volume_id == "handle-v"));
        assert_eq!(plan.cloned, Some(Key::namespaced("ns", "src")));

        let change = |edit: fn(&mut PersistentVolumeClaim, &mut PersistentVolume)| {
            let (mut source, mut volume) = pair();
            edit(&mut source, &mut volume);
            from(Some(source), Some(volume))
        };
        for (case, seen) in [
            ("no such claim", from(None, None)),
            ("not bound", change(|c, _| c.status.as_mut().unwrap().phase = Some("Pending".to_owned()))),
            ("being deleted", change(|c, _| c.metadata.deletion_timestamp = Some(build::time(1)))),
            (
                "larger than the clone",
                change(|c, _| {
                    *c = build::bound(build::claim("ns", "src", Some("fast"), "9Gi"), build::volume("v", "fast", "9Gi"))
                        .0
                }),
            ),
            (
                "another driver's",
                change(|_, v| v.spec.as_mut().unwrap().csi.as_mut().unwrap().driver = "other".to_owned()),
            ),
            ("its volume is gone", from(Some(source.clone()), None)),
        ] {
            assert!(matches!(claim(&seen), ClaimDecision::TryLater(_)), "{case}: {:?}", claim(&seen));
        }
        let cannot = ClaimSeen { clones_volumes: false, ..from(Some(source), Some(volume)) };
        assert!(matches!(claim(&cannot), ClaimDecision::Refuse(_)), "the driver cannot");
        let other = ClaimSeen { source: Source::Other, ..seen(asked("fast"), fast()) };
        assert_eq!(claim(&other), ClaimDecision::Wait(Wait::ForPopulator));
    }

    #[test]
    fn a_source_is_held_while_a_clone_of_it_is_pending() {
        let held = |deleting: bool, held: bool| {
            let mut c = build::claim("ns", "src", None, "1Gi");
            c.metadata.deletion_timestamp = deleting.then(|| build::time(1));
            c.metadata.finalizers = held.then(|| vec![finalizer::CLONING.to_owned()]);
            c
        };
        let pending = Arc::new(build::claim("ns", "clone", None, "1Gi"));
        let (bound, _) = build::bound(build::claim("ns", "clone", None, "1Gi"), build::volume("v", "", "1Gi"));
        for (case, source, clones, want) in [
            ("living", held(false, true), vec![pending.clone()], HoldDecision::Nothing),
            ("not held", held(true, false), vec![pending.clone()], HoldDecision::Nothing),
            ("a clone is under way", held(true, true), vec![pending], HoldDecision::Keep),
            ("the clone is done", held(true, true), vec![Arc::new(bound)], HoldDecision::LetGo),
            ("nobody clones it", held(true, true), vec![], HoldDecision::LetGo),
        ] {
            assert_eq!(hold(&source, &clones), want, "{case}");
        }
    }

    #[test]
    fn a_call_in_doubt_is_repeated_as_it_was_until_its_volume_is_recorded() {
        let ClaimDecision::Provision(plan) = claim(&seen(asked("fast"), fast())) else { panic!("refused") };
        let pending = Some(plan.as_ref().clone());
        let mut elsewhere = asked("fast");
        elsewhere.spec.as_mut().unwrap().volume_name = Some("another".to_owned());
        for (case, seen) in [
            ("its class is gone", seen(asked("fast"), None)),
            ("its class has other parameters now", seen(asked("fast"), with(&[("tier", "new")]))),
            ("its claim took another volume", seen(elsewhere, fast())),
        ] {
            let seen = ClaimSeen { pending: pending.clone(), ..seen };
            assert_eq!(claim(&seen), ClaimDecision::Provision(plan.clone()), "{case}");
            let recorded = ClaimSeen { volume_exists: true, ..seen };
            assert_eq!(claim(&recorded), ClaimDecision::Nothing, "{case}, and recorded");
        }
    }

    #[test]
    fn the_request_says_what_claim_and_class_ask_for() {
        let class = with(&[("csi.storage.k8s.io/fstype", "xfs"), ("tier", "gold")]);
        let ClaimDecision::Provision(plan) = claim(&seen(asked("fast"), class)) else { panic!("refused") };
        assert_eq!(plan.request.name, "pvc-uid-c");
        assert_eq!(plan.request.capacity_range.unwrap().required_bytes, 5 << 30);
        assert_eq!(plan.request.parameters, HashMap::from([("tier".to_owned(), "gold".to_owned())]));
        assert_eq!(plan.fs_type.as_deref(), Some("xfs"));
        let capability = &plan.request.volume_capabilities[0];
        assert_eq!(capability.access_mode.unwrap().mode, access::CsiAccessMode::SingleNodeWriter as i32);
        assert!(matches!(&capability.access_type, Some(AccessType::Mount(m)) if m.fs_type == "xfs"));
    }

    #[test]
    fn a_volume_is_deleted_only_when_released_and_detached() {
        let vol = |phase: &str, policy: &str, held: bool| {
            let mut v = build::volume("v", "fast", "1Gi");
            v.spec.as_mut().unwrap().persistent_volume_reclaim_policy = Some(policy.to_owned());
            v.status.as_mut().unwrap().phase = Some(phase.to_owned());
            v.metadata.finalizers = held.then(|| vec![finalizer::PROVISIONER.to_owned()]);
            v
        };
        let deleting = |mut v: PersistentVolume| {
            v.metadata.deletion_timestamp = Some(build::time(1));
            v
        };
        let foreign = {
            let mut v = vol("Released", "Delete", true);
            v.spec.as_mut().unwrap().csi.as_mut().unwrap().driver = "other".to_owned();
            v
        };
        let delete = VolumeDecision::Delete { handle: "handle-v".to_owned() };
        for (case, v, nodes, want) in [
            ("in use", vol("Bound", "Delete", true), vec![], VolumeDecision::Nothing),
            ("bound and not held yet", vol("Bound", "Delete", false), vec![], VolumeDecision::Hold),
            ("released", vol("Released", "Delete", true), vec![], delete.clone()),
            (
                "released and its record being deleted",
                deleting(vol("Released", "Delete", true)),
                vec![],
                delete.clone(),
            ),
            (
                "deleted already, the record goes",
                deleting(vol("Released", "Delete", false)),
                vec![],
                VolumeDecision::Nothing,
            ),
            (
                "still attached",
                vol("Released", "Delete", true),
                vec!["n1"],
                VolumeDecision::WaitForDetach("n1".to_owned()),
            ),
            ("to be kept", vol("Released", "Retain", false), vec![], VolumeDecision::Nothing),
            ("to be kept after all", vol("Released", "Retain", true), vec![], VolumeDecision::Release),
            ("deleted while bound", deleting(vol("Bound", "Delete", true)), vec![], VolumeDecision::Nothing),
            ("another driver's", foreign, vec![], VolumeDecision::Nothing),
        ] {
            let attached_to = nodes.into_iter().map(ToOwned::to_owned).collect();
            let seen = VolumeSeen { volume: Arc::new(v), attached_to, driver: DRIVER.to_owned() };
            assert_eq!(volume(&seen), want, "{case}");
        }
    }
}
