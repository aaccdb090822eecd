//! Tables of the claim's decisions and requests.

mod moved;

use std::collections::HashMap;

use cleat_api::access;
use cleat_api::key::Key;
use cleat_csi::v1::volume_capability::AccessType;
use cleat_csi::v1::volume_content_source as content;
use cleat_csi::v1::{Topology, Volume};
use cleat_testing::build::{self, DRIVER};
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use serde_json::json;

use super::source::SnapshotSeen;
use super::topology::NodeSeen;
use super::*;

pub(super) fn able() -> Abilities {
    Abilities {
        driver: DRIVER.to_owned(),
        creates_volumes: true,
        clones_volumes: true,
        takes_snapshots: true,
        modifies_volumes: true,
        tells_writers_apart: false,
        knows_topology: false,
    }
}

pub(super) fn asked(class: &str) -> PersistentVolumeClaim {
    let mut claim = build::claim("ns", "c", Some(class), "5Gi");
    build::annotate(&mut claim.metadata, annotation::STORAGE_PROVISIONER, DRIVER);
    claim
}

pub(super) fn seen(claim: PersistentVolumeClaim, class: Option<StorageClass>) -> ClaimSeen {
    ClaimSeen {
        claim: Arc::new(claim),
        class: class.map(Arc::new),
        volume_exists: false,
        pending: None,
        inherited: false,
        source: Source::Nothing,
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

fn decide(seen: &ClaimSeen) -> ClaimDecision {
    claim(seen, &able(), &Choices::default())
}

fn planned(seen: &ClaimSeen, fetched: Fetched, can: &Abilities, choices: &Choices) -> Result<Plan, Obstacle> {
    match claim(seen, can, choices) {
        ClaimDecision::Provision(outline) => outline.complete(seen, fetched, can, choices),
        ClaimDecision::Refuse(why) => Err(Obstacle::Final(why)),
        other => panic!("{other:?}"),
    }
}

fn plan(seen: &ClaimSeen) -> Result<Plan, Obstacle> {
    planned(seen, Fetched::default(), &able(), &Choices::default())
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
    let mut wanting = asked("fast");
    wanting.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
    let refuse = |why: &str| ClaimDecision::Refuse(why.to_owned());
    let weak = |edit: fn(&mut Abilities)| {
        let mut can = able();
        edit(&mut can);
        can
    };
    let cloning = ClaimSeen {
        source: Source::Claim { name: "src".to_owned(), claim: None, volume: None },
        ..seen(asked("fast"), fast())
    };
    let restoring = ClaimSeen { source: Source::Snapshot(Key::namespaced("ns", "s")), ..seen(asked("fast"), fast()) };
    for (case, can, seen, want) in [
        ("nobody named", able(), seen(build::claim("ns", "c", Some("fast"), "1Gi"), fast()), ClaimDecision::Nothing),
        (
            "another driver's",
            weak(|c| c.driver = "other".to_owned()),
            seen(asked("fast"), fast()),
            ClaimDecision::Nothing,
        ),
        (
            "a class of another driver's",
            able(),
            seen(asked("fast"), Some(build::class("fast", "other"))),
            ClaimDecision::Nothing,
        ),
        ("has its volume", able(), seen(pointing, fast()), ClaimDecision::Nothing),
        (
            "its volume is recorded",
            able(),
            ClaimSeen { volume_exists: true, ..seen(asked("fast"), fast()) },
            ClaimDecision::Nothing,
        ),
        ("its class is gone", able(), seen(asked("fast"), None), ClaimDecision::Wait(Wait::ClassMissing)),
        ("no consumer yet", able(), seen(asked("fast"), Some(waiting)), ClaimDecision::Wait(Wait::ForFirstConsumer)),
        (
            "somebody else fills it",
            able(),
            ClaimSeen { source: Source::Other, ..seen(asked("fast"), fast()) },
            ClaimDecision::Wait(Wait::ForPopulator),
        ),
        (
            "the source is in another namespace",
            able(),
            ClaimSeen { source: Source::Elsewhere, ..seen(asked("fast"), fast()) },
            refuse("sources in other namespaces are not supported"),
        ),
        (
            "a selector cannot be provisioned for",
            able(),
            seen(selecting, fast()),
            refuse("claim Selector is not supported"),
        ),
        (
            "a mode nobody knows",
            able(),
            seen(odd, fast()),
            refuse("access modes [Sometimes] cannot be offered together"),
        ),
        (
            "a driver without volumes of its own",
            weak(|c| c.creates_volumes = false),
            seen(asked("fast"), fast()),
            refuse("driver \"block.cleat.dev\" does not create volumes"),
        ),
        (
            "a driver that cannot copy",
            weak(|c| c.clones_volumes = false),
            cloning,
            refuse("driver \"block.cleat.dev\" does not clone volumes"),
        ),
        (
            "a driver without snapshots",
            weak(|c| c.takes_snapshots = false),
            restoring,
            refuse("driver \"block.cleat.dev\" does not support snapshots"),
        ),
        (
            "a driver that modifies nothing",
            weak(|c| c.modifies_volumes = false),
            seen(wanting, fast()),
            refuse("driver \"block.cleat.dev\" does not support VolumeAttributesClass"),
        ),
        (
            "a parameter meant for a provisioner, which it does not know",
            able(),
            seen(asked("fast"), with(&[("csi.storage.k8s.io/nonsense", "x")])),
            refuse("class \"fast\" has unknown parameter \"csi.storage.k8s.io/nonsense\""),
        ),
        (
            "two file system types",
            able(),
            seen(asked("fast"), with(&[("csi.storage.k8s.io/fstype", "xfs"), ("fsType", "ext4")])),
            refuse("class \"fast\" gives the file system type more than once"),
        ),
        (
            "a secret without a namespace",
            able(),
            seen(asked("fast"), with(&[("csi.storage.k8s.io/node-stage-secret-name", "s")])),
            refuse("class gives only one of name and namespace of its node-stage-secret"),
        ),
    ] {
        assert_eq!(claim(&seen, &can, &Choices::default()), want, "{case}");
    }
}

/// A claim that goes while it is held goes only when no volume can be in the making.
#[test]
fn a_claim_is_let_go_when_its_volume_is_certain() {
    let held = |deleting: bool, edit: fn(&mut PersistentVolumeClaim)| {
        let mut c = asked("fast");
        c.metadata.finalizers = Some(vec![finalizer::PROVISIONING.to_owned()]);
        c.metadata.deletion_timestamp = deleting.then(|| build::time(1));
        edit(&mut c);
        c
    };
    let plain = |deleting| held(deleting, |_| {});
    let point: fn(&mut PersistentVolumeClaim) = |c| c.spec.as_mut().unwrap().volume_name = Some("v".to_owned());
    let of_another: fn(&mut PersistentVolumeClaim) =
        |c| build::annotate(&mut c.metadata, annotation::STORAGE_PROVISIONER, "other");
    let free = |deleting| {
        let mut c = plain(deleting);
        c.metadata.finalizers = None;
        c
    };
    let inherited = |seen: ClaimSeen| ClaimSeen { inherited: true, ..seen };
    let recorded = |seen: ClaimSeen| ClaimSeen { volume_exists: true, ..seen };
    let doubtful = Arc::new(plan(&seen(asked("fast"), fast())).unwrap());
    let pending = |seen: ClaimSeen| ClaimSeen { pending: Some(doubtful.clone()), ..seen };
    let mut waiting = build::class("fast", DRIVER);
    waiting.volume_binding_mode = Some(claim::WAIT_FOR_FIRST_CONSUMER.to_owned());
    let selecting = held(true, |c| c.spec.as_mut().unwrap().selector = Some(Default::default()));
    for (case, seen, want) in [
        ("bound by somebody who does not know the hold", recorded(seen(held(false, point), fast())), "let go"),
        ("bound to another volume, never called", seen(held(false, point), fast()), "let go"),
        ("bound to another volume, a call in doubt", pending(seen(held(false, point), fast())), "repeat"),
        (
            "bound to another volume, an earlier provisioner may have called",
            inherited(seen(held(false, point), fast())),
            "provision",
        ),
        ("living, recorded: the binder's write frees it", recorded(seen(plain(false), fast())), "nothing"),
        ("going, recorded", recorded(seen(plain(true), fast())), "let go"),
        ("going, never called", seen(plain(true), fast()), "let go"),
        ("going, not held", seen(free(true), fast()), "nothing"),
        ("going, held by another driver's provisioner", seen(held(true, of_another), fast()), "nothing"),
        ("that from of old", inherited(seen(held(true, of_another), fast())), "nothing"),
        ("going, not held, and held when we began", inherited(seen(free(true), fast())), "nothing"),
        ("going, a call in doubt", pending(seen(plain(true), fast())), "repeat"),
        ("going, a call in doubt, and now recorded", recorded(pending(seen(plain(true), fast()))), "let go"),
        ("going, an earlier provisioner may have called", inherited(seen(plain(true), fast())), "provision"),
        ("that, and its volume is recorded", recorded(inherited(seen(plain(true), fast()))), "let go"),
        ("that, and it would have been refused", inherited(seen(selecting, fast())), "let go"),
        ("that, and no node was chosen", inherited(seen(plain(true), Some(waiting))), "let go"),
        ("that, and its class is gone", inherited(seen(plain(true), None)), "wait"),
        ("living, an earlier provisioner may have called", inherited(seen(plain(false), fast())), "provision"),
    ] {
        let got = match decide(&seen) {
            ClaimDecision::Nothing => "nothing",
            ClaimDecision::LetGo => "let go",
            ClaimDecision::Repeat(_) => "repeat",
            ClaimDecision::Provision(_) => "provision",
            ClaimDecision::Wait(Wait::InDoubt) => "wait",
            ClaimDecision::Wait(_) | ClaimDecision::Refuse(_) | ClaimDecision::Compete => "other",
        };
        assert_eq!(got, want, "{case}");
    }
}

#[test]
fn a_clone_is_made_from_a_bound_volume_of_the_same_driver() {
    let pair = || build::bound(build::claim("ns", "src", Some("fast"), "5Gi"), build::volume("v", "fast", "5Gi"));
    let from = |claim: Option<PersistentVolumeClaim>, volume: Option<PersistentVolume>| {
        let source = Source::Claim { name: "src".to_owned(), claim: claim.map(Arc::new), volume: volume.map(Arc::new) };
        ClaimSeen { source, ..seen(asked("fast"), fast()) }
    };
    let (source, volume) = pair();
    let made = plan(&from(Some(source.clone()), Some(volume.clone()))).unwrap();
    let origin = made.request.volume_content_source.unwrap().r#type.unwrap();
    assert!(matches!(origin, content::Type::Volume(v) if v.volume_id == "handle-v"));
    assert_eq!(made.cloned, Some(Key::namespaced("ns", "src")));

    let mut far = asked("fast");
    let far_source = json!({ "kind": "PersistentVolumeClaim", "name": "src", "namespace": "elsewhere" });
    far.spec.as_mut().unwrap().data_source_ref = Some(serde_json::from_value(far_source).unwrap());
    assert!(source::is_elsewhere(&far) && source::cloned(&far).is_none(), "another namespace's is not ours to copy");

    let change = |edit: fn(&mut PersistentVolumeClaim, &mut PersistentVolume)| {
        let (mut source, mut volume) = pair();
        edit(&mut source, &mut volume);
        from(Some(source), Some(volume))
    };
    let block: fn(&mut PersistentVolumeClaim, &mut PersistentVolume) =
        |c, _| c.spec.as_mut().unwrap().volume_mode = Some("Block".to_owned());
    for (case, seen) in [
        ("no such claim", from(None, None)),
        ("not bound", change(|c, _| c.status.as_mut().unwrap().phase = Some("Pending".to_owned()))),
        ("being deleted", change(|c, _| c.metadata.deletion_timestamp = Some(build::time(1)))),
        ("without a class", change(|c, _| c.spec.as_mut().unwrap().storage_class_name = None)),
        ("of another mode", change(block)),
        (
            "larger than the clone",
            change(|c, _| {
                *c = build::bound(build::claim("ns", "src", Some("fast"), "9Gi"), build::volume("v", "fast", "9Gi")).0
            }),
        ),
        ("another driver's", change(|_, v| v.spec.as_mut().unwrap().csi.as_mut().unwrap().driver = "other".to_owned())),
        ("its volume is another claim's", change(|_, v| v.spec.as_mut().unwrap().claim_ref = None)),
        ("its volume is gone", from(Some(source), None)),
    ] {
        assert!(matches!(plan(&seen), Err(Obstacle::Later(_))), "{case}: {:?}", plan(&seen));
    }
}

fn snapshot_pair() -> (serde_json::Value, serde_json::Value) {
    let snapshot = json!({
        "metadata": {"namespace": "ns", "name": "s", "uid": "uid-s"},
        "status": {"boundVolumeSnapshotContentName": "content", "readyToUse": true, "restoreSize": "5Gi"}
    });
    let content = json!({
        "metadata": {"name": "content"},
        "spec": {
            "driver": DRIVER, "sourceVolumeMode": "Filesystem",
            "volumeSnapshotRef": {"namespace": "ns", "name": "s", "uid": "uid-s"}
        },
        "status": {"snapshotHandle": "snap-1"}
    });
    (snapshot, content)
}

#[test]
fn a_volume_is_restored_from_a_ready_snapshot_of_the_same_driver() {
    let key = Key::namespaced("ns", "s");
    let restoring = || ClaimSeen { source: Source::Snapshot(key.clone()), ..seen(asked("fast"), fast()) };
    let try_with = |edit: &dyn Fn(&mut serde_json::Value, &mut serde_json::Value), choices: &Choices| {
        let (mut snapshot, mut content) = snapshot_pair();
        edit(&mut snapshot, &mut content);
        let snapshot = serde_json::from_value(snapshot).unwrap();
        let content = serde_json::from_value(content).unwrap();
        let fetched = Fetched {
            snapshot: SnapshotSeen { snapshot: Some(snapshot), content: Some(content) },
            ..Fetched::default()
        };
        planned(&restoring(), fetched, &able(), choices)
    };
    let usual = Choices::default();
    let made = try_with(&|_, _| {}, &usual).unwrap();
    let origin = made.request.volume_content_source.unwrap().r#type.unwrap();
    assert!(matches!(origin, content::Type::Snapshot(s) if s.snapshot_id == "snap-1"));
    assert_eq!(made.restored, Some(key.clone()));
    let gone = json!("2026-01-01T00:00:00Z");
    type Edit<'a> = &'a dyn Fn(&mut serde_json::Value, &mut serde_json::Value);
    let later: [(&str, Edit<'_>); 8] = [
        ("being deleted", &|s, _| s["metadata"]["deletionTimestamp"] = gone.clone()),
        ("not bound", &|s, _| s["status"]["boundVolumeSnapshotContentName"] = json!(null)),
        ("its content is another's", &|_, c| c["spec"]["volumeSnapshotRef"]["uid"] = json!("uid-other")),
        ("another driver's", &|_, c| c["spec"]["driver"] = json!("other")),
        ("not ready", &|s, _| s["status"]["readyToUse"] = json!(false)),
        ("larger than the claim", &|s, _| s["status"]["restoreSize"] = json!("9Gi")),
        ("of another mode", &|_, c| c["spec"]["sourceVolumeMode"] = json!("Block")),
        ("without a handle", &|_, c| c["status"] = json!(null)),
    ];
    for (case, edit) in later {
        assert!(matches!(try_with(edit, &usual), Err(Obstacle::Later(_))), "{case}");
    }
    assert!(matches!(plan(&restoring()), Err(Obstacle::Later(_))), "no such snapshot");
    let held: Edit<'_> = &|s, _| {
        s["metadata"]["deletionTimestamp"] = gone.clone();
        s["metadata"]["finalizers"] = json!([finalizer::SNAPSHOT_SOURCE_PROTECTION]);
    };
    let allowed: Edit<'_> = &|_, c| {
        c["spec"]["sourceVolumeMode"] = json!("Block");
        c["metadata"]["annotations"] = json!({annotation::ALLOW_MODE_CHANGE: "true"});
    };
    let lax = Choices { prevent_volume_mode_conversion: false, ..Choices::default() };
    assert!(try_with(held, &usual).is_ok(), "being deleted, and we hold it");
    assert!(try_with(allowed, &usual).is_ok(), "its content may change its mode");
    assert!(try_with(later[6].1, &lax).is_ok(), "nobody minds the mode");
}

#[test]
fn a_source_is_held_while_a_clone_of_it_is_pending() {
    let held = |deleting: bool, held: bool| {
        let mut c = build::claim("ns", "src", None, "1Gi");
        c.metadata.deletion_timestamp = deleting.then(|| build::time(1));
        c.metadata.finalizers = held.then(|| vec![finalizer::CLONING_PROTECTION.to_owned()]);
        c
    };
    let pending = Arc::new(build::claim("ns", "clone", None, "1Gi"));
    let (bound, _) = build::bound(build::claim("ns", "clone", None, "1Gi"), build::volume("v", "", "1Gi"));
    let bound = Arc::new(bound);
    for (case, source, clones, want) in [
        ("living", held(false, true), vec![pending.clone()], HoldDecision::Nothing),
        ("not held", held(true, false), vec![pending.clone()], HoldDecision::Nothing),
        ("a clone is under way", held(true, true), vec![pending.clone()], HoldDecision::Keep),
        ("the clone is done", held(true, true), vec![bound.clone()], HoldDecision::LetGo),
        ("nobody clones it", held(true, true), vec![], HoldDecision::LetGo),
    ] {
        assert_eq!(hold(&source, &clones), want, "{case}");
    }
    assert!(source::is_restored(std::slice::from_ref(&bound)), "a snapshot whose claim is bound may go");
    assert!(!source::is_restored(&[bound, pending]), "one that is still needed may not");
}

#[test]
fn a_call_in_doubt_is_repeated_as_it_was_until_its_volume_is_recorded() {
    let pending = Arc::new(plan(&seen(asked("fast"), fast())).unwrap());
    let mut elsewhere = asked("fast");
    elsewhere.spec.as_mut().unwrap().volume_name = Some("another".to_owned());
    for (case, seen) in [
        ("its class is gone", seen(asked("fast"), None)),
        ("its class has other parameters now", seen(asked("fast"), with(&[("tier", "new")]))),
        ("its claim took another volume", seen(elsewhere, fast())),
    ] {
        let seen = ClaimSeen { pending: Some(pending.clone()), ..seen };
        assert_eq!(decide(&seen), ClaimDecision::Repeat(pending.clone()), "{case}");
        let recorded = ClaimSeen { volume_exists: true, ..seen };
        assert_eq!(decide(&recorded), ClaimDecision::Nothing, "{case}, and recorded");
    }
}

#[test]
fn the_request_says_what_claim_and_class_ask_for() {
    let mut class = with(&[("csi.storage.k8s.io/fstype", "xfs"), ("tier", "gold")]).unwrap();
    class.mount_options = Some(vec!["noatime".to_owned()]);
    let made = plan(&seen(asked("fast"), Some(class))).unwrap();
    assert_eq!(made.request.name, "pvc-uid-c");
    assert_eq!(made.request.capacity_range.unwrap().required_bytes, 5 << 30);
    assert_eq!(made.request.parameters, HashMap::from([("tier".to_owned(), "gold".to_owned())]));
    assert_eq!(made.request.accessibility_requirements, None);
    assert_eq!(made.fs_type.as_deref(), Some("xfs"));
    let capability = &made.request.volume_capabilities[0];
    assert_eq!(capability.access_mode.unwrap().mode, access::CsiAccessMode::SingleNodeWriter as i32);
    let AccessType::Mount(mount) = capability.access_type.as_ref().unwrap() else { panic!("a block volume") };
    assert_eq!((mount.fs_type.as_str(), mount.mount_flags.as_slice()), ("xfs", &["noatime".to_owned()][..]));
}

#[test]
fn the_operators_choices_show_in_the_request() {
    let choices = Choices {
        volume_name_prefix: "disk".to_owned(),
        volume_name_uuid_length: Some(4),
        default_fs_type: Some("btrfs".to_owned()),
        extra_create_metadata: true,
        publish_read_only: true,
        ..Choices::default()
    };
    let mut reading = asked("fast");
    reading.metadata.uid = Some("ab-cd-ef".to_owned());
    reading.spec.as_mut().unwrap().access_modes = Some(vec!["ReadOnlyMany".to_owned()]);
    assert!(!plan(&seen(reading.clone(), fast())).unwrap().read_only, "only where the operator says so");
    let made = planned(&seen(reading, fast()), Fetched::default(), &able(), &choices).unwrap();
    assert_eq!(made.request.name, "disk-abcd");
    assert_eq!(made.fs_type.as_deref(), Some("btrfs"));
    assert!(made.read_only);
    let about = |key: &str| made.request.parameters[&format!("csi.storage.k8s.io/{key}")].as_str();
    assert_eq!([about("pvc/name"), about("pvc/namespace"), about("pv/name")], ["c", "ns", "disk-abcd"]);
    let mut block = asked("fast");
    block.spec.as_mut().unwrap().volume_mode = Some("Block".to_owned());
    let made = planned(&seen(block, fast()), Fetched::default(), &able(), &choices).unwrap();
    assert_eq!((made.fs_type, made.read_only), (None, false));
}

#[test]
fn what_the_class_names_must_be_there() {
    let name = "csi.storage.k8s.io/provisioner-secret-name";
    let secret = with(&[(name, "s"), ("csi.storage.k8s.io/provisioner-secret-namespace", "ns")]);
    let mut wanting = asked("fast");
    wanting.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
    let gold = |driver: &str| VolumeAttributesClass {
        driver_name: driver.to_owned(),
        parameters: Some([("iops".to_owned(), "9".to_owned())].into()),
        ..VolumeAttributesClass::default()
    };
    let go = |seen: &ClaimSeen, fetched| planned(seen, fetched, &able(), &Choices::default());
    let secretive = seen(asked("fast"), secret);
    let keys = HashMap::from([("user".to_owned(), "me".to_owned())]);
    assert!(matches!(go(&secretive, Fetched::default()), Err(Obstacle::Later(_))), "no secret");
    let made = go(&secretive, Fetched { secret: Some(keys.clone()), ..Fetched::default() }).unwrap();
    assert_eq!(made.request.secrets, keys);
    assert!(made.request.parameters.is_empty(), "the driver is not told where its secrets are from");
    let wanting = seen(wanting, fast());
    assert!(matches!(go(&wanting, Fetched::default()), Err(Obstacle::Later(_))), "no class of attributes");
    let foreign = Fetched { attributes: Some(gold("other")), ..Fetched::default() };
    assert!(matches!(go(&wanting, foreign), Err(Obstacle::Final(_))), "another driver's attributes");
    let made = go(&wanting, Fetched { attributes: Some(gold(DRIVER)), ..Fetched::default() }).unwrap();
    assert_eq!(made.request.mutable_parameters, HashMap::from([("iops".to_owned(), "9".to_owned())]));
}

#[test]
fn a_driver_with_topology_is_told_of_it() {
    let can = Abilities { knows_topology: true, ..able() };
    let label = [("zone".to_owned(), "a".to_owned())];
    let node = NodeSeen { name: "n1".to_owned(), keys: Some(vec!["zone".to_owned()]), labels: label.clone().into() };
    let fetched = Fetched { nodes: vec![node], ..Fetched::default() };
    let made = planned(&seen(asked("fast"), fast()), fetched.clone(), &can, &Choices::default()).unwrap();
    let wanted = made.request.accessibility_requirements.unwrap();
    assert_eq!(wanted.requisite, [Topology { segments: label.into() }]);
    assert!(!made.can_reschedule, "no node was chosen");
    let mut chosen = asked("fast");
    build::annotate(&mut chosen.metadata, annotation::SELECTED_NODE, "n1");
    assert!(planned(&seen(chosen.clone(), fast()), fetched, &can, &Choices::default()).unwrap().can_reschedule);
    let lost = planned(&seen(chosen, fast()), Fetched::default(), &can, &Choices::default());
    assert!(matches!(lost, Err(Obstacle::Reschedule(_))), "the chosen node is gone");
}

#[test]
fn the_record_says_what_was_asked_for_and_what_was_made() {
    let secrets = [("secret-name", "s"), ("secret-namespace", "ns")];
    let secrets = secrets.map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value));
    let mut class = with(&secrets.each_ref().map(|(k, v)| (k.as_str(), *v))).unwrap();
    class.reclaim_policy = Some("Retain".to_owned());
    class.mount_options = Some(vec!["noatime".to_owned()]);
    let claimed = asked("fast");
    let fetched = Fetched { secret: Some(HashMap::new()), ..Fetched::default() };
    let made = planned(&seen(claimed.clone(), Some(class)), fetched, &able(), &Choices::default()).unwrap();
    let volume = Volume {
        volume_id: "h".to_owned(),
        volume_context: HashMap::from([("path".to_owned(), "/x".to_owned())]),
        accessible_topology: vec![Topology { segments: [("zone".to_owned(), "a".to_owned())].into() }],
        ..Volume::default()
    };
    let pv = record::record(&claimed, &made, DRIVER, "me", volume).unwrap();
    let spec = pv.spec.unwrap();
    let csi = spec.csi.unwrap();
    assert_eq!(pv.metadata.name.as_deref(), Some("pvc-uid-c"));
    assert_eq!(pv.metadata.finalizers.as_deref(), Some(&[finalizer::PROVISIONER.to_owned()][..]));
    assert_eq!(spec.capacity.unwrap()["storage"].0, "5Gi", "a driver that does not say the size made it as asked");
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
fn a_volume_that_is_not_what_was_asked_for_is_given_back() {
    let plain = plan(&seen(asked("fast"), fast())).unwrap();
    let mut copy = plain.clone();
    copy.request.volume_content_source = Some(Default::default());
    let of = |bytes: i64, filled: bool| Volume {
        capacity_bytes: bytes,
        content_source: filled.then(Default::default),
        ..Volume::default()
    };
    for (case, plan, volume, faulty) in [
        ("as large as asked", &plain, of(5 << 30, false), false),
        ("larger", &plain, of(6 << 30, false), false),
        ("of no size", &plain, of(0, false), false),
        ("smaller", &plain, of(1 << 30, false), true),
        ("a copy", &copy, of(5 << 30, true), false),
        ("empty instead of a copy", &copy, of(5 << 30, false), true),
    ] {
        assert_eq!(record::fault(plan, &volume).is_some(), faulty, "{case}");
    }
}

#[test]
fn a_claim_that_rests_needs_nothing_whatever_else_is_seen() {
    let mut resting = 0;
    for bits in 0..64_u32 {
        let has = |bit: u32| bits & (1 << bit) != 0;
        let mut c = if has(0) { asked("fast") } else { build::claim("ns", "c", Some("fast"), "5Gi") };
        c.spec.as_mut().unwrap().volume_name = has(1).then(|| "v".to_owned());
        c.metadata.deletion_timestamp = has(2).then(|| build::time(1));
        let holds = [(3, finalizer::PROVISIONING), (4, finalizer::CLONING_PROTECTION)].into_iter().filter(|(bit, _)| has(*bit));
        c.metadata.finalizers = Some(holds.map(|(_, name)| name.to_owned()).collect());
        let rests = claim_rests(&c, &able());
        resting += u32::from(rests);
        let held = hold(&c, &[]);
        let decision = claim(&ClaimSeen { volume_exists: has(5), ..seen(c, fast()) }, &able(), &Choices::default());
        if rests {
            assert_eq!((decision, held), (ClaimDecision::Nothing, HoldDecision::Nothing), "{bits:b}");
        }
    }
    assert!(resting > 0);
    let mut served = asked("fast");
    served.spec.as_mut().unwrap().volume_name = Some("v".to_owned());
    for (case, c, want) in [
        ("nobody has asked yet", build::claim("ns", "c", Some("fast"), "5Gi"), true),
        ("asked", asked("fast"), false),
        ("served", served, true),
    ] {
        assert_eq!(claim_rests(&c, &able()), want, "{case}");
    }
}
