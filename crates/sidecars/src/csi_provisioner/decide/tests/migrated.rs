//! Claims and classes of in-tree plugins that were migrated to a CSI driver.

use super::*;

const EBS: &str = "ebs.csi.aws.com";
const PLUGIN: &str = "kubernetes.io/aws-ebs";

fn ebs_capabilities() -> DriverCapabilities {
    DriverCapabilities { name: EBS.to_owned(), ..all_capabilities() }
}

fn claim_of(name: &str, migrated_to: Option<&str>) -> PersistentVolumeClaim {
    let mut claim = build::claim("ns", "c", Some("gp2"), "5Gi");
    build::annotate(&mut claim.metadata, annotation::STORAGE_PROVISIONER_BETA, name);
    migrated_to.into_iter().for_each(|to| build::annotate(&mut claim.metadata, annotation::MIGRATED_TO, to));
    claim
}

fn gp2(parameters: &[(&str, &str)]) -> Option<StorageClass> {
    with(parameters).map(|class| StorageClass { provisioner: PLUGIN.to_owned(), ..class })
}

#[test]
fn the_driver_serves_claims_of_its_plugin() {
    for (case, claim_, serves) in [
        ("of the driver", claim_of(EBS, None), true),
        ("of the plugin, migrated", claim_of(PLUGIN, Some(EBS)), true),
        ("of the plugin, not migrated yet", claim_of(PLUGIN, None), false),
        ("of another plugin", claim_of("kubernetes.io/gce-pd", Some(EBS)), false),
        ("of another provisioner", claim_of("x", Some(EBS)), false),
    ] {
        let got = claim(&snapshot(claim_, gp2(&[])), &ebs_capabilities(), &ProvisionPolicy::default());
        assert_eq!(matches!(got, ClaimDecision::Provision(_)), serves, "{case}: {got:?}");
        assert!(serves || got == ClaimDecision::Nothing, "{case}: {got:?}");
    }
    let foreign = claim(&snapshot(claim_of(EBS, None), fast()), &ebs_capabilities(), &ProvisionPolicy::default());
    assert_eq!(foreign, ClaimDecision::Nothing, "a class of another driver");
}

#[test]
fn the_request_and_the_volume_are_translated() {
    let class = gp2(&[("fsType", "xfs"), ("zone", "us-east-1a"), ("type", "gp2")]);
    let snapshot_ = snapshot(claim_of(EBS, None), class);
    let can = DriverCapabilities { supports_topology: true, ..ebs_capabilities() };
    let plan = planned(&snapshot_, FetchedObjects::default(), &can, &ProvisionPolicy::default()).unwrap();
    assert_eq!(plan.request.parameters, HashMap::from([("type".to_owned(), "gp2".to_owned())]));
    assert_eq!(plan.fs_type.as_deref(), Some("xfs"));
    let topology = &plan.request.accessibility_requirements.as_ref().unwrap().requisite[0];
    assert_eq!(topology.segments["topology.ebs.csi.aws.com/zone"], "us-east-1a");
    let volume = Volume { volume_id: "vol-1".to_owned(), ..Volume::default() };
    let pv = persistent_volume::build(&snapshot_.claim, &plan, EBS, "me", volume).unwrap();
    assert_eq!(pv.metadata.annotations.as_ref().unwrap()[annotation::PROVISIONED_BY], PLUGIN);
    assert_eq!(pv.spec.unwrap().aws_elastic_block_store.unwrap().volume_id, "vol-1");
    let untranslatable = Volume {
        volume_id: "vol-1".to_owned(),
        volume_context: HashMap::from([("partition".to_owned(), "x".to_owned())]),
        ..Volume::default()
    };
    assert!(
        persistent_volume::build(&snapshot_.claim, &plan, EBS, "me", untranslatable).is_err(),
        "the plugin has no form for it"
    );
}

#[test]
fn a_class_with_zone_and_allowed_topologies_is_refused() {
    let mut class = gp2(&[("zone", "a")]).unwrap();
    let terms = json!([{ "matchLabelExpressions": [{ "key": "zone", "values": ["b"] }] }]);
    class.allowed_topologies = Some(serde_json::from_value(terms).unwrap());
    let got = claim(&snapshot(claim_of(EBS, None), Some(class)), &ebs_capabilities(), &ProvisionPolicy::default());
    assert!(matches!(&got, ClaimDecision::Refuse(why) if why.contains("zone")), "{got:?}");
}
