//! What the in-tree volumes of each cloud become, source by source.

use super::*;
use crate::keys::label;
use k8s_openapi::api::core::v1::*;
use k8s_openapi::api::storage::v1::StorageClass;

fn of(spec: PersistentVolumeSpec) -> PersistentVolume {
    PersistentVolume { spec: Some(spec), ..PersistentVolume::default() }
}

fn shown(volume: &PersistentVolume) -> String {
    let csi = csi(volume).unwrap().unwrap();
    let attributes: Vec<_> =
        csi.volume_attributes.iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
    format!(
        "{} {} {} {} {}",
        csi.driver,
        csi.volume_handle,
        csi.fs_type.as_deref().unwrap_or("-"),
        if csi.read_only == Some(true) { "ro" } else { "rw" },
        attributes.join(",")
    )
}

fn ebs(id: &str) -> AWSElasticBlockStoreVolumeSource {
    AWSElasticBlockStoreVolumeSource {
        volume_id: id.to_owned(),
        fs_type: Some("xfs".to_owned()),
        partition: Some(2),
        read_only: Some(true),
    }
}

fn gce() -> GCEPersistentDiskVolumeSource {
    GCEPersistentDiskVolumeSource { pd_name: "d".to_owned(), ..GCEPersistentDiskVolumeSource::default() }
}

fn azure() -> AzureDiskVolumeSource {
    AzureDiskVolumeSource {
        disk_name: "d".to_owned(),
        disk_uri: "/subscriptions/s/disks/d".to_owned(),
        caching_mode: Some("None".to_owned()),
        fs_type: Some("ext4".to_owned()),
        ..AzureDiskVolumeSource::default()
    }
}

#[test]
fn each_old_source_becomes_its_drivers() {
    type Spec = PersistentVolumeSpec;
    let file = AzureFilePersistentVolumeSource {
        secret_name: "azure-storage-account-acc-secret".to_owned(),
        share_name: "share".to_owned(),
        ..AzureFilePersistentVolumeSource::default()
    };
    let cinder = CinderPersistentVolumeSource { volume_id: "c".to_owned(), ..CinderPersistentVolumeSource::default() };
    let vsphere = VsphereVirtualDiskVolumeSource {
        volume_path: "[ds] a.vmdk".to_owned(),
        storage_policy_name: Some("gold".to_owned()),
        ..VsphereVirtualDiskVolumeSource::default()
    };
    let portworx =
        PortworxVolumeSource { volume_id: "p".to_owned(), read_only: Some(true), ..PortworxVolumeSource::default() };
    for (case, spec, want) in [
        (
            "EBS, as a URL",
            Spec { aws_elastic_block_store: Some(ebs("aws://eu-west-1a/vol-1")), ..Spec::default() },
            "ebs.csi.aws.com vol-1 xfs ro partition=2",
        ),
        (
            "EBS, bare",
            Spec { aws_elastic_block_store: Some(ebs("vol-1")), ..Spec::default() },
            "ebs.csi.aws.com vol-1 xfs ro partition=2",
        ),
        (
            "GCE without a zone",
            Spec { gce_persistent_disk: Some(gce()), ..Spec::default() },
            "pd.csi.storage.gke.io projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d - rw partition=",
        ),
        (
            "Azure disk",
            Spec { azure_disk: Some(azure()), ..Spec::default() },
            "disk.csi.azure.com /subscriptions/s/disks/d ext4 rw cachingMode=None,csi-migration=true,fsType=ext4,kind=Managed",
        ),
        (
            "Azure file",
            Spec { azure_file: Some(file), ..Spec::default() },
            "file.csi.azure.com #acc#share# - rw sharename=share",
        ),
        ("Cinder", Spec { cinder: Some(cinder), ..Spec::default() }, "cinder.csi.openstack.org c - rw "),
        (
            "vSphere",
            Spec { vsphere_volume: Some(vsphere), ..Spec::default() },
            "csi.vsphere.vmware.com [ds] a.vmdk - rw storagepolicyname=gold",
        ),
        ("Portworx", Spec { portworx_volume: Some(portworx), ..Spec::default() }, "pxd.portworx.com p - rw "),
    ] {
        let old = of(spec);
        assert_eq!(shown(&old), want, "{case}");
        let new = volume(&old).unwrap().into_owned();
        assert_eq!(shown(&new), want, "{case}");
        assert!(source::of_volume(&new).unwrap().is_none(), "{case}: the old source is gone");
    }
}

#[test]
fn what_did_not_move_is_left_alone() {
    let volume = cleat_testing::build::volume("v", "", "1Gi");
    assert!(matches!(super::volume(&volume), Ok(Cow::Borrowed(_))));
    let nfs = of(PersistentVolumeSpec { nfs: Some(NFSVolumeSource::default()), ..PersistentVolumeSpec::default() });
    assert_eq!(csi(&nfs), Ok(None));
    assert_eq!(inline(&Volume::default(), "ns"), Ok(None));
    assert_eq!(driver_of("kubernetes.io/cinder"), Some("cinder.csi.openstack.org"));
    assert_eq!(driver_of("kubernetes.io/nfs"), None);
}

#[test]
fn a_gce_disk_says_where_it_is_as_well_as_it_can() {
    let old = |label: &str| {
        let mut volume =
            of(PersistentVolumeSpec { gce_persistent_disk: Some(gce()), ..PersistentVolumeSpec::default() });
        volume.metadata.labels = Some([(ZONES[1].to_owned(), label.to_owned())].into());
        volume
    };
    for (label, want) in [
        ("us-east1-a", Ok("projects/UNSPECIFIED/zones/us-east1-a/disks/d")),
        ("us-east1-a__us-east1-b", Ok("projects/UNSPECIFIED/regions/us-east1/disks/d")),
        ("us-east1-a__east1-b", Err("us-east1-a__east1-b")),
        ("us-east-a__us-west-b", Err("us-east-a__us-west-b")),
    ] {
        let found = csi(&old(label)).map(|csi| csi.unwrap().volume_handle.clone());
        assert_eq!(found, want.map(str::to_owned).map_err(|zones| MigrateError::Region(zones.to_owned())), "{label}");
    }
    let node = "projects/p/zones/us-east-a/instances/i";
    for (handle, want) in [
        ("projects/q/zones/z/disks/d", Some("projects/q/zones/z/disks/d")),
        ("projects/UNSPECIFIED/zones/z/disks/d", Some("projects/p/zones/z/disks/d")),
        ("projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d", Some("projects/p/zones/us-east-a/disks/d")),
        ("projects/UNSPECIFIED/regions/UNSPECIFIED/disks/d", Some("projects/p/regions/us-east/disks/d")),
        ("projects/UNSPECIFIED/moons/UNSPECIFIED/disks/d", None),
        ("d", None),
    ] {
        assert_eq!(repair_handle(GCE_PD.driver, handle, node).ok().as_deref(), want, "{handle}");
    }
    assert_eq!(repair_handle(AWS_EBS.driver, "vol-1", "i-1").as_deref(), Ok("vol-1"));
}

#[test]
fn access_modes_and_zones_are_the_drivers() {
    let mut old = of(PersistentVolumeSpec { gce_persistent_disk: Some(gce()), ..PersistentVolumeSpec::default() });
    for (modes, want) in [
        (&["ReadWriteMany"][..], "ReadWriteOnce"),
        (&["ReadWriteOnce", "ReadOnlyMany"], "ReadWriteOnce"),
        (&["ReadOnlyMany"], "ReadOnlyMany"),
    ] {
        old.spec.as_mut().unwrap().access_modes = Some(modes.iter().map(ToString::to_string).collect());
        let new = volume(&old).unwrap();
        assert_eq!(new.spec.as_ref().unwrap().access_modes, Some(vec![want.to_owned()]), "{modes:?}");
    }
    let rule = NodeSelectorRequirement { key: ZONES[0].to_owned(), operator: "In".to_owned(), values: None };
    let term = NodeSelectorTerm { match_expressions: Some(vec![rule]), ..NodeSelectorTerm::default() };
    old.spec.as_mut().unwrap().node_affinity =
        Some(VolumeNodeAffinity { required: Some(NodeSelector { node_selector_terms: vec![term] }) });
    let new = volume(&old).unwrap().into_owned().spec.unwrap().node_affinity.unwrap().required.unwrap();
    assert_eq!(new.node_selector_terms[0].match_expressions.as_ref().unwrap()[0].key, "topology.gke.io/zone");
}

#[test]
fn a_pods_own_disk_becomes_a_volume_that_is_named_after_it() {
    let disk = |read_only| {
        let gce = GCEPersistentDiskVolumeSource { read_only: Some(read_only), ..gce() };
        let volume = Volume { gce_persistent_disk: Some(gce), ..Volume::default() };
        inline(&volume, "ns").unwrap().unwrap()
    };
    assert_eq!(disk(false).metadata.name.as_deref(), Some("pd.csi.storage.gke.io-d"));
    assert_eq!(disk(false).spec.unwrap().access_modes, Some(vec!["ReadWriteOnce".to_owned()]));
    assert_eq!(disk(true).spec.unwrap().access_modes, Some(vec!["ReadOnlyMany".to_owned()]));
    let bad = Volume { aws_elastic_block_store: Some(ebs("aws://z/disk-1")), ..Volume::default() };
    assert_eq!(inline(&bad, "ns"), Err(MigrateError::EbsVolume("aws://z/disk-1".to_owned())));
    let share = AzureFileVolumeSource {
        secret_name: "own".to_owned(),
        share_name: "s".to_owned(),
        ..AzureFileVolumeSource::default()
    };
    let share = inline(&Volume { azure_file: Some(share), ..Volume::default() }, "ns").unwrap().unwrap();
    let csi = share.spec.unwrap().csi.unwrap();
    assert_eq!(csi.volume_handle, "#own#s#");
    assert_eq!(csi.node_stage_secret_ref.unwrap().namespace.as_deref(), Some("ns"));
}

fn class_of(plugin: &str, parameters: &[(&str, &str)], topology: &[(&str, &[&str])]) -> StorageClass {
    let rule = |(key, values): &(&str, &[&str])| TopologySelectorLabelRequirement {
        key: (*key).to_owned(),
        values: values.iter().map(ToString::to_string).collect(),
    };
    let rules: Vec<_> = topology.iter().map(rule).collect();
    let term = TopologySelectorTerm { match_label_expressions: Some(rules) };
    StorageClass {
        provisioner: plugin.to_owned(),
        parameters: Some(parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()),
        allowed_topologies: (!topology.is_empty()).then(|| vec![term]),
        ..StorageClass::default()
    }
}

#[test]
fn each_old_class_becomes_its_drivers() {
    let zone = ZONES[0];
    let portworx = "csi.storage.k8s.io/controller-expand-secret-name=s,\
                    csi.storage.k8s.io/controller-publish-secret-name=s,\
                    csi.storage.k8s.io/node-expand-secret-name=s,csi.storage.k8s.io/node-publish-secret-name=s,\
                    csi.storage.k8s.io/node-stage-secret-name=s,csi.storage.k8s.io/provisioner-secret-name=s,repl=2";
    for (case, class_, want) in [
        (
            "type and zone of a disk",
            class_of(AWS_EBS.plugin, &[("fsType", "xfs"), ("zone", "us-east-1a"), ("type", "gp2")], &[]),
            "csi.storage.k8s.io/fstype=xfs,type=gp2 topology.ebs.csi.aws.com/zone=us-east-1a",
        ),
        (
            "speed by size",
            class_of(AWS_EBS.plugin, &[("iopsPerGB", "10")], &[]),
            "allowautoiopspergbincrease=true,iopsPerGB=10 ",
        ),
        ("several zones", class_of(GCE_PD.plugin, &[("zones", "a,b")], &[]), " topology.gke.io/zone=a|b"),
        (
            "zones as every node has them",
            class_of(GCE_PD.plugin, &[], &[(zone, &["a"]), ("rack", &["r"])]),
            " topology.gke.io/zone=a,rack=r",
        ),
        (
            "fault domains",
            class_of(AZURE_DISK.plugin, &[("fsType", "ext4")], &[(zone, &["0", "westus-1"])]),
            "fsType=ext4 topology.disk.csi.azure.com/zone=|westus-1",
        ),
        ("a share", class_of(AZURE_FILE.plugin, &[("zone", "x")], &[(zone, &["a"])]), &format!("zone=x {zone}=a")),
        (
            "availability is the driver's business",
            class_of(CINDER.plugin, &[("availability", "nova"), ("fstype", "ext4")], &[(zone, &["a"])]),
            "availability=nova,csi.storage.k8s.io/fstype=ext4 topology.cinder.csi.openstack.org/zone=a",
        ),
        (
            "options with names of their own, others not at all",
            class_of(VSPHERE.plugin, &[("diskFormat", "thin"), ("what", "x")], &[(zone, &["a"])]),
            "csimigration=true,diskformat-migrationparam=thin topology.csi.vmware.com/zone=a",
        ),
        (
            "one secret for everything",
            class_of(PORTWORX.plugin, &[("openstorage.io/auth-secret-name", "s"), ("repl", "2")], &[]),
            &format!("{portworx} "),
        ),
        ("nobody who moved", class_of("x.test", &[("zone", "a"), ("fsType", "xfs")], &[]), "fsType=xfs,zone=a "),
    ] {
        let got = class(&class_).unwrap();
        let parameters: Vec<_> = got.parameters.iter().flatten().map(|(k, v)| format!("{k}={v}")).collect();
        let terms = got.allowed_topologies.iter().flatten();
        let rules = terms.flat_map(|term| term.match_label_expressions.iter().flatten());
        let rules: Vec<_> = rules.map(|rule| format!("{}={}", rule.key, rule.values.join("|"))).collect();
        assert_eq!(format!("{} {}", parameters.join(","), rules.join(",")), want, "{case}");
        assert_eq!(got.provisioner, class_.provisioner, "{case}: the record says who was asked");
    }
    let twice = class_of(AWS_EBS.plugin, &[("zone", "a")], &[(zone, &["b"])]);
    assert_eq!(class(&twice).unwrap_err(), MigrateError::ZonesTwice);
}

/// What a driver has made, in one zone if one is given.
fn made(driver: Moved, handle: &str, attributes: &[(&str, &str)], place: &[(&str, &str)]) -> PersistentVolume {
    let rule = |(key, value): &(&str, &str)| NodeSelectorRequirement {
        key: (*key).to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![(*value).to_owned()]),
    };
    let term = NodeSelectorTerm { match_expressions: Some(place.iter().map(rule).collect()), match_fields: None };
    let required = Some(NodeSelector { node_selector_terms: vec![term] });
    of(PersistentVolumeSpec {
        csi: Some(CSIPersistentVolumeSource {
            driver: driver.driver.to_owned(),
            volume_handle: handle.to_owned(),
            fs_type: Some("ext4".to_owned()),
            volume_attributes: Some(attributes.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()),
            ..CSIPersistentVolumeSource::default()
        }),
        node_affinity: (!place.is_empty()).then_some(VolumeNodeAffinity { required }),
        ..PersistentVolumeSpec::default()
    })
}

#[test]
fn a_new_volume_is_recorded_as_the_old_plugin_would_have_and_seen_as_its_drivers() {
    let disk = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/disks/d";
    for (moved, handle, attributes, place, labels) in [
        (
            AWS_EBS,
            "vol-1",
            &[("partition", "2")][..],
            &[("topology.ebs.csi.aws.com/zone", "us-east-1a")][..],
            "us-east-1 us-east-1a",
        ),
        (
            GCE_PD,
            "projects/p/zones/us-central1-a/disks/d",
            &[],
            &[("topology.gke.io/zone", "us-central1-a")],
            "us-central1 us-central1-a",
        ),
        (AZURE_DISK, disk, &[("cachingMode", "None")], &[("topology.disk.csi.azure.com/zone", "westus-1")], ""),
        (AZURE_FILE, "g#acc#share#", &[], &[], ""),
        (CINDER, "c", &[], &[("topology.cinder.csi.openstack.org/zone", "nova")], "nova"),
        (
            VSPHERE,
            "id",
            &[("initialvolumefilepath", "[ds] a.vmdk")],
            &[("topology.csi.vmware.com/zone", "z"), ("topology.csi.vmware.com/region", "r")],
            "r z",
        ),
        (PORTWORX, "p", &[], &[], ""),
    ] {
        let name = moved.plugin;
        let old = back(moved.plugin, made(moved, handle, attributes, place)).unwrap();
        assert!(old.spec.as_ref().unwrap().csi.is_none(), "{name}");
        let told: Vec<_> = old.metadata.labels.iter().flatten().map(|(_, value)| value.as_str()).collect();
        assert_eq!(told.join(" "), labels, "{name}");
        let seen = csi(&old).unwrap().unwrap_or_else(|| panic!("{name}: nobody's volume"));
        assert_eq!(seen.driver, moved.driver, "{name}");
        let found = match moved {
            GCE_PD => {
                repair_handle(GCE_PD.driver, &seen.volume_handle, "projects/p/zones/us-central1-a/instances/i").unwrap()
            }
            VSPHERE => "id".to_owned(),
            _ => seen.volume_handle.clone(),
        };
        assert_eq!(found, handle, "{name}: the driver finds it again");
    }
    let shared = made(AZURE_FILE, "g#acc#share#", &[], &[]);
    let file = back(AZURE_FILE.plugin, shared).unwrap();
    assert_eq!(file.spec.unwrap().azure_file.unwrap().secret_name, "azure-storage-account-acc-secret");
    assert_eq!(file.metadata.annotations.unwrap()["kubernetes.io/azure-file-resource-group"], "g");
    let foreign = made(AWS_EBS, "vol-1", &[], &[]);
    assert_eq!(back("x.test", foreign.clone()).unwrap(), foreign, "nobody who moved");
    for (moved, handle, attributes) in [
        (GCE_PD, "d", &[][..]),
        (AZURE_DISK, "d", &[]),
        (AZURE_FILE, "share", &[]),
        (AWS_EBS, "v", &[("partition", "x")]),
    ] {
        assert!(back(moved.plugin, made(moved, handle, attributes, &[])).is_err(), "{}: {handle}", moved.plugin);
    }
}

#[test]
fn zones_tell_their_region() {
    for (zone, region) in [
        ("us-west-2a", Some("us-west-2")),
        ("us-gov-east-1a", Some("us-gov-east-1")),
        ("us-west-2-lax-1a", Some("us-west-2")),
        ("us-east-1-wl1-bos-wlz-1", Some("us-east-1")),
        ("somewhere", None),
    ] {
        let made = made(AWS_EBS, "vol-1", &[], &[("topology.ebs.csi.aws.com/zone", zone)]);
        let label = back(AWS_EBS.plugin, made).ok().and_then(|v| v.metadata.labels?.get(label::REGION).cloned());
        assert_eq!(label.as_deref(), region, "{zone}");
    }
}
