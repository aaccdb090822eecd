//! Cases of [`super::resolve_pod`].

use std::collections::HashMap;

use cleat_testing::build;
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, VolumeDevice, VolumeMount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::*;

#[derive(Default)]
struct TestObjects {
    claims: HashMap<Key, Arc<PersistentVolumeClaim>>,
    volumes: HashMap<String, Arc<PersistentVolume>>,
    drivers: HashMap<String, Arc<CSIDriver>>,
}

impl ObjectReader for TestObjects {
    fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>> {
        self.claims.get(key).cloned()
    }
    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.volumes.get(name).cloned()
    }
    fn driver(&self, name: &str) -> Option<Arc<CSIDriver>> {
        self.drivers.get(name).cloned()
    }
}

/// A pod with one mounted claim `ns/c`, bound to `pv`.
struct Case {
    pod: Pod,
    claim: Option<PersistentVolumeClaim>,
    volume: Option<PersistentVolume>,
    driver: Option<CSIDriver>,
}

impl Case {
    fn new() -> Case {
        let mut pod = build::pod("ns", "p", "n1", &["c"]);
        mount(&mut pod, "v-c");
        let (claim, volume) = build::bound(build::claim("ns", "c", None, "1Gi"), build::volume("pv", "", "1Gi"));
        Case { pod, claim: Some(claim), volume: Some(volume), driver: None }
    }

    fn resolve(&self) -> DesiredPod {
        let mut objects = TestObjects::default();
        if let Some(claim) = &self.claim {
            objects.claims.insert(Key::of(&claim.metadata), Arc::new(claim.clone()));
        }
        if let Some(volume) = &self.volume {
            objects.volumes.insert(volume.metadata.name.clone().unwrap(), Arc::new(volume.clone()));
        }
        if let Some(driver) = &self.driver {
            objects.drivers.insert(driver.metadata.name.clone().unwrap(), Arc::new(driver.clone()));
        }
        resolve_pod(&self.pod, &objects)
    }

    fn error_reason(&self) -> Option<&'static str> {
        self.resolve().volumes[0].spec.as_ref().err().map(ResolveError::reason)
    }
}

fn mount(pod: &mut Pod, volume: &str) {
    let mount = VolumeMount { name: volume.into(), mount_path: "/data".into(), ..VolumeMount::default() };
    pod.spec.as_mut().unwrap().containers[0].volume_mounts.get_or_insert_default().push(mount);
}

#[test]
fn a_bound_claim_resolves_to_its_volume() {
    let mut case = Case::new();
    let spec = case.volume.as_mut().unwrap().spec.as_mut().unwrap();
    spec.mount_options = Some(vec!["noatime".into()]);
    let csi = spec.csi.as_mut().unwrap();
    csi.fs_type = Some("xfs".into());
    csi.volume_attributes = Some([("k".to_owned(), "v".to_owned())].into());
    csi.node_stage_secret_ref = Some(SecretReference { name: Some("s".into()), namespace: Some("ns2".into()) });
    case.pod.spec.as_mut().unwrap().volumes.as_mut().unwrap()[0].persistent_volume_claim.as_mut().unwrap().read_only =
        Some(true);
    case.driver = Some(CSIDriver::default());
    let driver = case.driver.as_mut().unwrap();
    driver.metadata.name = Some(build::DRIVER.into());
    driver.spec.pod_info_on_mount = Some(true);

    let desired = case.resolve();
    assert_eq!(desired.lifecycle, PodLifecycle::Running);
    let spec = desired.volumes[0].spec.clone().unwrap();
    assert_eq!(
        *spec,
        VolumeSpec {
            id: VolumeId::new(build::DRIVER, "handle-pv"),
            spec_name: "pv".into(),
            read_only: true,
            fs_type: "xfs".into(),
            mount_options: vec!["noatime".into()],
            access_modes: vec!["ReadWriteOnce".into()],
            attributes: [("k".to_owned(), "v".to_owned())].into(),
            stage_secret: Some(Key::namespaced("ns2", "s")),
            publish_secret: None,
            pod_info: true,
        }
    );
    assert!(!spec.is_exclusive());
}

#[test]
fn unresolved_volumes_have_a_reason() {
    type Change = fn(&mut Case);
    let cases: [(&str, Change, Option<&str>); 12] = [
        ("all well", |_| {}, None),
        ("no such claim", |c| c.claim = None, Some("ClaimMissing")),
        ("claim pending", |c| c.claim = Some(build::claim("ns", "c", None, "1Gi")), Some("ClaimNotBound")),
        (
            "claim names its volume but is not Bound yet",
            |c| c.claim.as_mut().unwrap().status.as_mut().unwrap().phase = Some("Pending".into()),
            Some("ClaimNotBound"),
        ),
        ("no such volume", |c| c.volume = None, Some("VolumeMissing")),
        (
            "the volume belongs to an earlier claim of the same name",
            |c| {
                let spec = c.volume.as_mut().unwrap().spec.as_mut().unwrap();
                spec.claim_ref.as_mut().unwrap().uid = Some("other".into());
            },
            Some("VolumeNotBound"),
        ),
        (
            "a claim being deleted is usable as long as it is protected",
            |c| {
                let meta = &mut c.claim.as_mut().unwrap().metadata;
                meta.deletion_timestamp = Some(build::time(5));
                meta.finalizers = Some(vec![finalizer::PVC_PROTECTION.into()]);
            },
            None,
        ),
        (
            "a claim being deleted without protection",
            |c| c.claim.as_mut().unwrap().metadata.deletion_timestamp = Some(build::time(5)),
            Some("ClaimDeleting"),
        ),
        (
            "a driver name that leaves its directory",
            |c| c.volume.as_mut().unwrap().spec.as_mut().unwrap().csi.as_mut().unwrap().driver = "../../x".into(),
            Some("InvalidName"),
        ),
        (
            "a raw block volume used as a directory",
            |c| c.volume.as_mut().unwrap().spec.as_mut().unwrap().volume_mode = Some("Block".into()),
            Some("WrongVolumeMode"),
        ),
        (
            "a raw block volume used as a device",
            |c| {
                c.volume.as_mut().unwrap().spec.as_mut().unwrap().volume_mode = Some("Block".into());
                let container = &mut c.pod.spec.as_mut().unwrap().containers[0];
                container.volume_mounts = None;
                container.volume_devices =
                    Some(vec![VolumeDevice { name: "v-c".into(), device_path: "/dev/x".into() }]);
            },
            Some("UnsupportedVolume"),
        ),
        (
            "a volume of another kind",
            |c| {
                let spec = c.volume.as_mut().unwrap().spec.as_mut().unwrap();
                spec.csi = None;
                spec.nfs = Some(Default::default());
            },
            Some("UnsupportedVolume"),
        ),
    ];
    for (name, change, want) in cases {
        let mut case = Case::new();
        change(&mut case);
        assert_eq!(case.error_reason(), want, "{name}");
    }
}

#[test]
fn unsupported_volumes_are_named_and_unused_volumes_ignored() {
    let mut case = Case::new();
    let volumes = case.pod.spec.as_mut().unwrap().volumes.as_mut().unwrap();
    for name in ["scratch", "unused"] {
        let empty_dir = Some(EmptyDirVolumeSource::default());
        volumes.push(Volume { name: name.into(), empty_dir, ..Volume::default() });
    }
    mount(&mut case.pod, "scratch");
    let desired = case.resolve();
    assert_eq!(desired.volumes.len(), 2);
    let error = desired.volumes[1].spec.as_ref().unwrap_err();
    assert_eq!(error.to_string(), "emptyDir volumes are not supported by this node agent yet");
}

#[test]
fn an_ephemeral_claim_must_belong_to_the_pod() {
    let mut case = Case::new();
    let spec = case.pod.spec.as_mut().unwrap();
    spec.volumes = None;
    build::ephemeral_volume(&mut case.pod, "v-c");
    case.claim.as_mut().unwrap().metadata.name = Some("p-v-c".into());
    let spec = case.volume.as_mut().unwrap().spec.as_mut().unwrap();
    spec.claim_ref.as_mut().unwrap().name = Some("p-v-c".into());
    assert_eq!(case.error_reason(), Some("ClaimNotOwned"));
    case.claim.as_mut().unwrap().metadata.owner_references = Some(vec![OwnerReference {
        uid: case.pod.metadata.uid.clone().unwrap(),
        controller: Some(true),
        ..OwnerReference::default()
    }]);
    assert_eq!(case.error_reason(), None);
}

#[test]
fn the_lifecycle_follows_deletion_and_containers() {
    let mut case = Case::new();
    build::running(&mut case.pod, "main");
    case.pod.metadata.deletion_timestamp = Some(build::time(9));
    assert_eq!(case.resolve().lifecycle, PodLifecycle::Terminating, "a container still runs");
    case.pod.status.as_mut().unwrap().container_statuses = None;
    assert_eq!(case.resolve().lifecycle, PodLifecycle::Terminated);
    case.pod.metadata.deletion_timestamp = None;
    case.pod.status.as_mut().unwrap().phase = Some("Failed".into());
    assert_eq!(case.resolve().lifecycle, PodLifecycle::Terminated, "finished, though the object stays");
}
