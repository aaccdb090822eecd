//! Claims and classes of plugins that moved.

use super::*;

const EBS: &str = "ebs.csi.aws.com";
const PLUGIN: &str = "kubernetes.io/aws-ebs";

fn ebs() -> Abilities {
    Abilities { driver: EBS.to_owned(), ..able() }
}

fn asked_of(name: &str, moved_to: Option<&str>) -> PersistentVolumeClaim {
    let mut claim = build::claim("ns", "c", Some("gp2"), "5Gi");
    build::annotate(&mut claim.metadata, annotation::STORAGE_PROVISIONER_BETA, name);
    moved_to.into_iter().for_each(|to| build::annotate(&mut claim.metadata, annotation::MIGRATED_TO, to));
    claim
}

fn gp2(parameters: &[(&str, &str)]) -> Option<StorageClass> {
    with(parameters).map(|class| StorageClass { provisioner: PLUGIN.to_owned(), ..class })
}

#[test]
fn the_driver_serves_what_was_asked_of_its_plugin() {
    for (case, claim_, serves) in [
        ("asked of the driver", asked_of(EBS, None), true),
        ("asked of the plugin, and handed over", asked_of(PLUGIN, Some(EBS)), true),
        ("asked of the plugin, and nobody has handed it over yet", asked_of(PLUGIN, None), false),
        ("asked of another plugin", asked_of("kubernetes.io/gce-pd", Some(EBS)), false),
        ("asked of somebody else", asked_of("x", Some(EBS)), false),
    ] {
        let got = claim(&seen(claim_, gp2(&[])), &ebs(), &Choices::default());
        assert_eq!(matches!(got, ClaimDecision::Provision(_)), serves, "{case}: {got:?}");
        assert!(serves || got == ClaimDecision::Nothing, "{case}: {got:?}");
    }
    let foreign = claim(&seen(asked_of(EBS, None), fast()), &ebs(), &Choices::default());
    assert_eq!(foreign, ClaimDecision::Nothing, "a class of another driver");
}

#[test]
fn the_request_and_the_record_are_translated() {
    let class = gp2(&[("fsType", "xfs"), ("zone", "us-east-1a"), ("type", "gp2")]);
    let seen_ = seen(asked_of(EBS, None), class);
    let can = Abilities { knows_topology: true, ..ebs() };
    let made = planned(&seen_, Fetched::default(), &can, &Choices::default()).unwrap();
    assert_eq!(made.request.parameters, HashMap::from([("type".to_owned(), "gp2".to_owned())]));
    assert_eq!(made.fs_type.as_deref(), Some("xfs"));
    let place = &made.request.accessibility_requirements.as_ref().unwrap().requisite[0];
    assert_eq!(place.segments["topology.ebs.csi.aws.com/zone"], "us-east-1a");
    let volume = Volume { volume_id: "vol-1".to_owned(), ..Volume::default() };
    let pv = record::record(&seen_.claim, &made, EBS, "me", volume).unwrap();
    assert_eq!(pv.metadata.annotations.as_ref().unwrap()[annotation::PROVISIONED_BY], PLUGIN);
    assert_eq!(pv.spec.unwrap().aws_elastic_block_store.unwrap().volume_id, "vol-1");
    let odd = Volume {
        volume_id: "vol-1".to_owned(),
        volume_context: HashMap::from([("partition".to_owned(), "x".to_owned())]),
        ..Volume::default()
    };
    assert!(record::record(&seen_.claim, &made, EBS, "me", odd).is_err(), "nothing that the plugin could have made");
}

#[test]
fn a_class_that_says_twice_where_is_refused() {
    let mut class = gp2(&[("zone", "a")]).unwrap();
    let terms = json!([{ "matchLabelExpressions": [{ "key": "zone", "values": ["b"] }] }]);
    class.allowed_topologies = Some(serde_json::from_value(terms).unwrap());
    let got = claim(&seen(asked_of(EBS, None), Some(class)), &ebs(), &Choices::default());
    assert!(matches!(&got, ClaimDecision::Refuse(why) if why.contains("zone")), "{got:?}");
}
