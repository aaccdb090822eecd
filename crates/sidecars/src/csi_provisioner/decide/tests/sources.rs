//! Data sources: clones and restores.

use super::*;
use cleat_csi::v1::volume_content_source as content;
use k8s_openapi::api::core::v1::PersistentVolume;

use super::super::source::RestoreSource;

#[test]
fn a_clone_needs_a_bound_volume_of_the_same_driver() {
    let pair = || build::bound(build::claim("ns", "src", Some("fast"), "5Gi"), build::volume("v", "fast", "5Gi"));
    let from = |claim: Option<PersistentVolumeClaim>, volume: Option<PersistentVolume>| {
        let source =
            DataSource::Claim { name: "src".to_owned(), claim: claim.map(Arc::new), volume: volume.map(Arc::new) };
        ClaimSnapshot { source, ..snapshot(assigned_claim("fast"), fast()) }
    };
    let (source, volume) = pair();
    let created_plan = plan(&from(Some(source.clone()), Some(volume.clone()))).unwrap();
    let origin = created_plan.request.volume_content_source.unwrap().r#type.unwrap();
    assert!(matches!(origin, content::Type::Volume(v) if v.volume_id == "handle-v"));
    assert_eq!(created_plan.clone_source, Some(Key::namespaced("ns", "src")));

    let mut other_namespace = assigned_claim("fast");
    let reference = json!({ "kind": "PersistentVolumeClaim", "name": "src", "namespace": "elsewhere" });
    other_namespace.spec.as_mut().unwrap().data_source_ref = Some(serde_json::from_value(reference).unwrap());
    assert!(
        source::is_in_other_namespace(&other_namespace) && source::clone_source(&other_namespace).is_none(),
        "a source in another namespace is not cloned"
    );

    let change = |edit: fn(&mut PersistentVolumeClaim, &mut PersistentVolume)| {
        let (mut source, mut volume) = pair();
        edit(&mut source, &mut volume);
        from(Some(source), Some(volume))
    };
    let block: fn(&mut PersistentVolumeClaim, &mut PersistentVolume) =
        |c, _| c.spec.as_mut().unwrap().volume_mode = Some("Block".to_owned());
    for (case, snapshot) in [
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
        (
            "of another driver",
            change(|_, v| v.spec.as_mut().unwrap().csi.as_mut().unwrap().driver = "other".to_owned()),
        ),
        ("its volume is bound to another claim", change(|_, v| v.spec.as_mut().unwrap().claim_ref = None)),
        ("its volume does not exist", from(Some(source), None)),
    ] {
        assert!(matches!(plan(&snapshot), Err(PlanError::Later(_))), "{case}: {:?}", plan(&snapshot));
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
fn a_restore_needs_a_ready_snapshot_of_the_same_driver() {
    let key = Key::namespaced("ns", "s");
    let restoring =
        || ClaimSnapshot { source: DataSource::Snapshot(key.clone()), ..snapshot(assigned_claim("fast"), fast()) };
    let try_with = |edit: &dyn Fn(&mut serde_json::Value, &mut serde_json::Value), policy: &ProvisionPolicy| {
        let (mut snapshot, mut content) = snapshot_pair();
        edit(&mut snapshot, &mut content);
        let snapshot = serde_json::from_value(snapshot).unwrap();
        let content = serde_json::from_value(content).unwrap();
        let fetched = FetchedObjects {
            snapshot: RestoreSource { snapshot: Some(snapshot), content: Some(content) },
            ..FetchedObjects::default()
        };
        planned(&restoring(), fetched, &all_capabilities(), policy)
    };
    let default = ProvisionPolicy::default();
    let created_plan = try_with(&|_, _| {}, &default).unwrap();
    let origin = created_plan.request.volume_content_source.unwrap().r#type.unwrap();
    assert!(matches!(origin, content::Type::Snapshot(s) if s.snapshot_id == "snap-1"));
    assert_eq!(created_plan.restore_source, Some(key.clone()));
    let deleted_at = json!("2026-01-01T00:00:00Z");
    type Edit<'a> = &'a dyn Fn(&mut serde_json::Value, &mut serde_json::Value);
    let later: [(&str, Edit<'_>); 8] = [
        ("being deleted", &|s, _| s["metadata"]["deletionTimestamp"] = deleted_at.clone()),
        ("not bound", &|s, _| s["status"]["boundVolumeSnapshotContentName"] = json!(null)),
        ("its content belongs to another snapshot", &|_, c| c["spec"]["volumeSnapshotRef"]["uid"] = json!("uid-other")),
        ("of another driver", &|_, c| c["spec"]["driver"] = json!("other")),
        ("not ready", &|s, _| s["status"]["readyToUse"] = json!(false)),
        ("larger than the claim", &|s, _| s["status"]["restoreSize"] = json!("9Gi")),
        ("of another mode", &|_, c| c["spec"]["sourceVolumeMode"] = json!("Block")),
        ("without a handle", &|_, c| c["status"] = json!(null)),
    ];
    for (case, edit) in later {
        assert!(matches!(try_with(edit, &default), Err(PlanError::Later(_))), "{case}");
    }
    assert!(matches!(plan(&restoring()), Err(PlanError::Later(_))), "no such snapshot");
    let protected: Edit<'_> = &|s, _| {
        s["metadata"]["deletionTimestamp"] = deleted_at.clone();
        s["metadata"]["finalizers"] = json!([finalizer::SNAPSHOT_SOURCE_PROTECTION]);
    };
    let allowed: Edit<'_> = &|_, c| {
        c["spec"]["sourceVolumeMode"] = json!("Block");
        c["metadata"]["annotations"] = json!({annotation::ALLOW_MODE_CHANGE: "true"});
    };
    let allows_conversion = ProvisionPolicy { prevent_volume_mode_conversion: false, ..ProvisionPolicy::default() };
    assert!(try_with(protected, &default).is_ok(), "being deleted, with the restoring finalizer");
    assert!(try_with(allowed, &default).is_ok(), "the content's annotation allows the conversion");
    assert!(try_with(later[6].1, &allows_conversion).is_ok(), "mode conversion is allowed");
}

#[test]
fn a_source_keeps_its_finalizer_while_a_clone_is_pending() {
    let source = |deleting: bool, has_finalizer: bool| {
        let mut c = build::claim("ns", "src", None, "1Gi");
        c.metadata.deletion_timestamp = deleting.then(|| build::time(1));
        c.metadata.finalizers = has_finalizer.then(|| vec![finalizer::CLONING_PROTECTION.to_owned()]);
        c
    };
    let pending = Arc::new(build::claim("ns", "clone", None, "1Gi"));
    let (bound, _) = build::bound(build::claim("ns", "clone", None, "1Gi"), build::volume("v", "", "1Gi"));
    let bound = Arc::new(bound);
    for (case, source, clones, want) in [
        ("not being deleted", source(false, true), vec![pending.clone()], SourceFinalizerDecision::Nothing),
        ("without the finalizer", source(true, false), vec![pending.clone()], SourceFinalizerDecision::Nothing),
        ("a clone is pending", source(true, true), vec![pending.clone()], SourceFinalizerDecision::Keep),
        ("the clone is bound", source(true, true), vec![bound.clone()], SourceFinalizerDecision::Remove),
        ("no clones", source(true, true), vec![], SourceFinalizerDecision::Remove),
    ] {
        assert_eq!(source_finalizer(&source, &clones), want, "{case}");
    }
    assert!(source::is_restored(std::slice::from_ref(&bound)), "a snapshot whose claim is bound may be deleted");
    assert!(!source::is_restored(&[bound, pending]), "one with a pending claim may not");
}
