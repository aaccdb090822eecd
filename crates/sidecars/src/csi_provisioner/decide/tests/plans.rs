//! Plans: the CreateVolume request, and the PersistentVolume built from its reply.

use super::super::topology::NodeTopology;
use super::*;
use cleat_api::access;
use cleat_csi::v1::Topology;
use cleat_csi::v1::volume_capability::AccessType;
use k8s_openapi::api::storage::v1::VolumeAttributesClass;

#[test]
fn the_request_is_built_from_claim_and_class() {
    let mut class = with(&[("csi.storage.k8s.io/fstype", "xfs"), ("tier", "gold")]).unwrap();
    class.mount_options = Some(vec!["noatime".to_owned()]);
    let created_plan = plan(&snapshot(assigned_claim("fast"), Some(class))).unwrap();
    assert_eq!(created_plan.request.name, "pvc-uid-c");
    assert_eq!(created_plan.request.capacity_range.unwrap().required_bytes, 5 << 30);
    assert_eq!(created_plan.request.parameters, HashMap::from([("tier".to_owned(), "gold".to_owned())]));
    assert_eq!(created_plan.request.accessibility_requirements, None);
    assert_eq!(created_plan.fs_type.as_deref(), Some("xfs"));
    let capability = &created_plan.request.volume_capabilities[0];
    assert_eq!(capability.access_mode.unwrap().mode, access::CsiAccessMode::SingleNodeWriter as i32);
    let AccessType::Mount(mount) = capability.access_type.as_ref().unwrap() else { panic!("a block volume") };
    assert_eq!((mount.fs_type.as_str(), mount.mount_flags.as_slice()), ("xfs", &["noatime".to_owned()][..]));
}

#[test]
fn the_policy_shows_in_the_request() {
    let policy = ProvisionPolicy {
        volume_name_prefix: "disk".to_owned(),
        volume_name_uuid_length: Some(4),
        default_fs_type: Some("btrfs".to_owned()),
        extra_create_metadata: true,
        publish_read_only: true,
        ..ProvisionPolicy::default()
    };
    let mut reading = assigned_claim("fast");
    reading.metadata.uid = Some("ab-cd-ef".to_owned());
    reading.spec.as_mut().unwrap().access_modes = Some(vec!["ReadOnlyMany".to_owned()]);
    assert!(!plan(&snapshot(reading.clone(), fast())).unwrap().read_only, "only with publish_read_only");
    let created_plan =
        planned(&snapshot(reading, fast()), FetchedObjects::default(), &all_capabilities(), &policy).unwrap();
    assert_eq!(created_plan.request.name, "disk-abcd");
    assert_eq!(created_plan.fs_type.as_deref(), Some("btrfs"));
    assert!(created_plan.read_only);
    let about = |key: &str| created_plan.request.parameters[&format!("csi.storage.k8s.io/{key}")].as_str();
    assert_eq!([about("pvc/name"), about("pvc/namespace"), about("pv/name")], ["c", "ns", "disk-abcd"]);
    let mut block = assigned_claim("fast");
    block.spec.as_mut().unwrap().volume_mode = Some("Block".to_owned());
    let created_plan =
        planned(&snapshot(block, fast()), FetchedObjects::default(), &all_capabilities(), &policy).unwrap();
    assert_eq!((created_plan.fs_type, created_plan.read_only), (None, false));
}

#[test]
fn the_objects_that_a_draft_names_must_exist() {
    let name = "csi.storage.k8s.io/provisioner-secret-name";
    let secret = with(&[(name, "s"), ("csi.storage.k8s.io/provisioner-secret-namespace", "ns")]);
    let mut wanting = assigned_claim("fast");
    wanting.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
    let gold = |driver: &str| VolumeAttributesClass {
        driver_name: driver.to_owned(),
        parameters: Some([("iops".to_owned(), "9".to_owned())].into()),
        ..VolumeAttributesClass::default()
    };
    let complete = |snapshot: &ClaimSnapshot, fetched| {
        planned(snapshot, fetched, &all_capabilities(), &ProvisionPolicy::default())
    };
    let with_secret = snapshot(assigned_claim("fast"), secret);
    let keys = HashMap::from([("user".to_owned(), "me".to_owned())]);
    assert!(matches!(complete(&with_secret, FetchedObjects::default()), Err(PlanError::Later(_))), "no secret");
    let created_plan =
        complete(&with_secret, FetchedObjects { secret: Some(keys.clone()), ..FetchedObjects::default() }).unwrap();
    assert_eq!(created_plan.request.secrets, keys);
    assert!(created_plan.request.parameters.is_empty(), "parameters that name secrets are not sent to the driver");
    let wanting = snapshot(wanting, fast());
    assert!(
        matches!(complete(&wanting, FetchedObjects::default()), Err(PlanError::Later(_))),
        "no VolumeAttributesClass"
    );
    let foreign = FetchedObjects { attributes_class: Some(gold("other")), ..FetchedObjects::default() };
    assert!(
        matches!(complete(&wanting, foreign), Err(PlanError::Final(_))),
        "a VolumeAttributesClass of another driver"
    );
    let created_plan =
        complete(&wanting, FetchedObjects { attributes_class: Some(gold(DRIVER)), ..FetchedObjects::default() })
            .unwrap();
    assert_eq!(created_plan.request.mutable_parameters, HashMap::from([("iops".to_owned(), "9".to_owned())]));
}

#[test]
fn a_driver_with_topology_gets_a_requirement() {
    let driver = DriverCapabilities { supports_topology: true, ..all_capabilities() };
    let label = [("zone".to_owned(), "a".to_owned())];
    let node =
        NodeTopology { name: "n1".to_owned(), keys: Some(vec!["zone".to_owned()]), labels: label.clone().into() };
    let fetched = FetchedObjects { nodes: vec![node], ..FetchedObjects::default() };
    let created_plan =
        planned(&snapshot(assigned_claim("fast"), fast()), fetched.clone(), &driver, &ProvisionPolicy::default())
            .unwrap();
    let wanted = created_plan.request.accessibility_requirements.unwrap();
    assert_eq!(wanted.requisite, [Topology { segments: label.into() }]);
    assert!(!created_plan.can_reschedule, "no node is selected");
    let mut selected = assigned_claim("fast");
    build::annotate(&mut selected.metadata, annotation::SELECTED_NODE, "n1");
    assert!(
        planned(&snapshot(selected.clone(), fast()), fetched, &driver, &ProvisionPolicy::default())
            .unwrap()
            .can_reschedule
    );
    let without_node =
        planned(&snapshot(selected, fast()), FetchedObjects::default(), &driver, &ProvisionPolicy::default());
    assert!(matches!(without_node, Err(PlanError::Reschedule(_))), "the selected node does not exist");
}

#[test]
fn the_persistent_volume_has_what_was_requested_and_what_was_created() {
    let secrets = [("secret-name", "s"), ("secret-namespace", "ns")];
    let secrets = secrets.map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value));
    let mut class = with(&secrets.each_ref().map(|(k, v)| (k.as_str(), *v))).unwrap();
    class.reclaim_policy = Some("Retain".to_owned());
    class.mount_options = Some(vec!["noatime".to_owned()]);
    let claimed = assigned_claim("fast");
    let fetched = FetchedObjects { secret: Some(HashMap::new()), ..FetchedObjects::default() };
    let created_plan =
        planned(&snapshot(claimed.clone(), Some(class)), fetched, &all_capabilities(), &ProvisionPolicy::default())
            .unwrap();
    let volume = Volume {
        volume_id: "h".to_owned(),
        volume_context: HashMap::from([("path".to_owned(), "/x".to_owned())]),
        accessible_topology: vec![Topology { segments: [("zone".to_owned(), "a".to_owned())].into() }],
        ..Volume::default()
    };
    let pv = persistent_volume::build(&claimed, &created_plan, DRIVER, "me", volume).unwrap();
    let spec = pv.spec.unwrap();
    let csi = spec.csi.unwrap();
    assert_eq!(pv.metadata.name.as_deref(), Some("pvc-uid-c"));
    assert_eq!(pv.metadata.finalizers.as_deref(), Some(&[finalizer::PROVISIONER.to_owned()][..]));
    assert_eq!(spec.capacity.unwrap()["storage"].0, "5Gi", "without a size in the reply, the requested one");
    assert_eq!(spec.claim_ref.unwrap().uid.as_deref(), Some("uid-c"));
    assert_eq!(spec.persistent_volume_reclaim_policy.as_deref(), Some("Retain"));
    assert_eq!(spec.mount_options.as_deref(), Some(&["noatime".to_owned()][..]));
    assert!(spec.node_affinity.is_some());
    let attributes = csi.volume_attributes.unwrap();
    assert_eq!(attributes["path"], "/x");
    assert_eq!(attributes["storage.kubernetes.io/csiProvisionerIdentity"], "me");
    assert_eq!(csi.node_stage_secret_ref.unwrap().name.as_deref(), Some("s"));
    let annotations = pv.metadata.annotations.unwrap();
    assert_eq!(annotations[annotation::PROVISIONED_BY], DRIVER);
    assert_eq!(annotations[annotation::DELETION_SECRET_NAME], "s");
    assert_eq!(annotations[annotation::MODIFY_SECRET_NAMESPACE], "ns");
}

#[test]
fn a_volume_that_does_not_match_the_request_has_a_defect() {
    let plain = plan(&snapshot(assigned_claim("fast"), fast())).unwrap();
    let mut copy = plain.clone();
    copy.request.volume_content_source = Some(Default::default());
    let of = |bytes: i64, filled: bool| Volume {
        capacity_bytes: bytes,
        content_source: filled.then(Default::default),
        ..Volume::default()
    };
    for (case, plan, volume, faulty) in [
        ("as large as requested", &plain, of(5 << 30, false), false),
        ("larger", &plain, of(6 << 30, false), false),
        ("without a size", &plain, of(0, false), false),
        ("smaller", &plain, of(1 << 30, false), true),
        ("with its content source", &copy, of(5 << 30, true), false),
        ("without the requested content source", &copy, of(5 << 30, false), true),
    ] {
        assert_eq!(persistent_volume::defect(plan, &volume).is_some(), faulty, "{case}");
    }
}

#[test]
fn a_plan_that_fails_for_good_frees_only_a_deleted_claim() {
    let mut c = assigned_claim("fast");
    c.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
    let foreign = VolumeAttributesClass { driver_name: "other".to_owned(), ..VolumeAttributesClass::default() };
    let decide_plan = |claimed: PersistentVolumeClaim, attributes_class: Option<VolumeAttributesClass>| {
        let snapshot = ClaimSnapshot { inherited: true, ..snapshot(claimed, fast()) };
        let ClaimDecision::Provision(draft) = decide(&snapshot) else { panic!("not provisioned") };
        let fetched = FetchedObjects { attributes_class, ..FetchedObjects::default() };
        super::super::plan(*draft, &snapshot, fetched, &all_capabilities(), &ProvisionPolicy::default())
    };
    assert!(matches!(decide_plan(c.clone(), Some(foreign.clone())), PlanDecision::Refuse(_)));
    assert!(matches!(decide_plan(c.clone(), None), PlanDecision::RetryLater(_)));
    c.metadata.deletion_timestamp = Some(build::time(1));
    c.metadata.finalizers = Some(vec![finalizer::PROVISIONING.to_owned()]);
    assert_eq!(decide_plan(c, Some(foreign)), PlanDecision::RemoveFinalizer);
}
