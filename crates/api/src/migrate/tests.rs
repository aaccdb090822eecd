//! Translation of in-tree volumes and classes, for each plugin.

use super::*;
use crate::well_known::label;
use k8s_openapi::api::core::v1::*;
use k8s_openapi::api::storage::v1::StorageClass;

fn volume_of(spec: PersistentVolumeSpec) -> PersistentVolume {
    PersistentVolume { spec: Some(spec), ..PersistentVolume::default() }
}

fn shown(volume: &PersistentVolume) -> String {
    let csi = csi_source(volume).unwrap().unwrap();
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
fn each_in_tree_source_is_translated_to_its_drivers() {
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
        let old = volume_of(spec);
        assert_eq!(shown(&old), want, "{case}");
        let new = translate_volume(&old).unwrap().into_owned();
        assert_eq!(shown(&new), want, "{case}");
        assert!(source::translate_source(&new).unwrap().is_none(), "{case}: the in-tree source is removed");
    }
}

#[test]
fn a_volume_of_a_plugin_that_was_not_migrated_is_unchanged() {
    let volume = cleat_testing::build::volume("v", "", "1Gi");
    assert!(matches!(translate_volume(&volume), Ok(Cow::Borrowed(_))));
    let nfs =
        volume_of(PersistentVolumeSpec { nfs: Some(NFSVolumeSource::default()), ..PersistentVolumeSpec::default() });
    assert_eq!(csi_source(&nfs), Ok(None));
    assert_eq!(translate_inline_volume(&Volume::default(), "ns"), Ok(None));
    assert_eq!(driver_of("kubernetes.io/cinder"), Some("cinder.csi.openstack.org"));
    assert_eq!(driver_of("kubernetes.io/nfs"), None);
}

#[test]
fn the_handle_of_a_gce_disk_is_completed_from_labels_and_node() {
    let old = |label: &str| {
        let mut volume =
            volume_of(PersistentVolumeSpec { gce_persistent_disk: Some(gce()), ..PersistentVolumeSpec::default() });
        volume.metadata.labels = Some([(ZONE_LABELS[1].to_owned(), label.to_owned())].into());
        volume
    };
    for (label, want) in [
        ("us-east1-a", Ok("projects/UNSPECIFIED/zones/us-east1-a/disks/d")),
        ("us-east1-a__us-east1-b", Ok("projects/UNSPECIFIED/regions/us-east1/disks/d")),
        ("us-east1-a__east1-b", Err("us-east1-a__east1-b")),
        ("us-east-a__us-west-b", Err("us-east-a__us-west-b")),
    ] {
        let found = csi_source(&old(label)).map(|csi| csi.unwrap().volume_handle.clone());
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
fn access_modes_and_zone_keys_are_translated() {
    let mut old =
        volume_of(PersistentVolumeSpec { gce_persistent_disk: Some(gce()), ..PersistentVolumeSpec::default() });
    for (modes, want) in [
        (&["ReadWriteMany"][..], "ReadWriteOnce"),
        (&["ReadWriteOnce", "ReadOnlyMany"], "ReadWriteOnce"),
        (&["ReadOnlyMany"], "ReadOnlyMany"),
    ] {
        old.spec.as_mut().unwrap().access_modes = Some(modes.iter().map(ToString::to_string).collect());
        let new = translate_volume(&old).unwrap();
        assert_eq!(new.spec.as_ref().unwrap().access_modes, Some(vec![want.to_owned()]), "{modes:?}");
    }
    let rule = NodeSelectorRequirement { key: ZONE_LABELS[0].to_owned(), operator: "In".to_owned(), values: None };
    let term = NodeSelectorTerm { match_expressions: Some(vec![rule]), ..NodeSelectorTerm::default() };
    old.spec.as_mut().unwrap().node_affinity =
        Some(VolumeNodeAffinity { required: Some(NodeSelector { node_selector_terms: vec![term] }) });
    let new = translate_volume(&old).unwrap().into_owned().spec.unwrap().node_affinity.unwrap().required.unwrap();
    assert_eq!(new.node_selector_terms[0].match_expressions.as_ref().unwrap()[0].key, "topology.gke.io/zone");
}

#[test]
fn an_inline_volume_becomes_a_volume_named_after_the_disk() {
    let disk = |read_only| {
        let gce = GCEPersistentDiskVolumeSource { read_only: Some(read_only), ..gce() };
        let volume = Volume { gce_persistent_disk: Some(gce), ..Volume::default() };
        translate_inline_volume(&volume, "ns").unwrap().unwrap()
    };
    assert_eq!(disk(false).metadata.name.as_deref(), Some("pd.csi.storage.gke.io-d"));
    assert_eq!(disk(false).spec.unwrap().access_modes, Some(vec!["ReadWriteOnce".to_owned()]));
    assert_eq!(disk(true).spec.unwrap().access_modes, Some(vec!["ReadOnlyMany".to_owned()]));
    let bad = Volume { aws_elastic_block_store: Some(ebs("aws://z/disk-1")), ..Volume::default() };
    assert_eq!(translate_inline_volume(&bad, "ns"), Err(MigrateError::EbsVolume("aws://z/disk-1".to_owned())));
    let share = AzureFileVolumeSource {
        secret_name: "own".to_owned(),
        share_name: "s".to_owned(),
        ..AzureFileVolumeSource::default()
    };
    let share =
        translate_inline_volume(&Volume { azure_file: Some(share), ..Volume::default() }, "ns").unwrap().unwrap();
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
fn each_in_tree_class_is_translated_for_its_driver() {
    let zone = ZONE_LABELS[0];
    let portworx = "csi.storage.k8s.io/controller-expand-secret-name=s,\
                    csi.storage.k8s.io/controller-publish-secret-name=s,\
                    csi.storage.k8s.io/node-expand-secret-name=s,csi.storage.k8s.io/node-publish-secret-name=s,\
                    csi.storage.k8s.io/node-stage-secret-name=s,csi.storage.k8s.io/provisioner-secret-name=s,repl=2";
    for (case, class, want) in [
        (
            "type and zone of a disk",
            class_of(AWS_EBS.plugin, &[("fsType", "xfs"), ("zone", "us-east-1a"), ("type", "gp2")], &[]),
            "csi.storage.k8s.io/fstype=xfs,type=gp2 topology.ebs.csi.aws.com/zone=us-east-1a",
        ),
        (
            "IOPS per size",
            class_of(AWS_EBS.plugin, &[("iopsPerGB", "10")], &[]),
            "allowautoiopspergbincrease=true,iopsPerGB=10 ",
        ),
        ("several zones", class_of(GCE_PD.plugin, &[("zones", "a,b")], &[]), " topology.gke.io/zone=a|b"),
        (
            "well-known zone labels",
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
            "other parameters are passed on",
            class_of(CINDER.plugin, &[("availability", "nova"), ("fstype", "ext4")], &[(zone, &["a"])]),
            "availability=nova,csi.storage.k8s.io/fstype=ext4 topology.cinder.csi.openstack.org/zone=a",
        ),
        (
            "options are renamed, unknown ones dropped",
            class_of(VSPHERE.plugin, &[("diskFormat", "thin"), ("what", "x")], &[(zone, &["a"])]),
            "csimigration=true,diskformat-migrationparam=thin topology.csi.vmware.com/zone=a",
        ),
        (
            "one secret for all calls",
            class_of(PORTWORX.plugin, &[("openstorage.io/auth-secret-name", "s"), ("repl", "2")], &[]),
            &format!("{portworx} "),
        ),
        ("not migrated", class_of("x.test", &[("zone", "a"), ("fsType", "xfs")], &[]), "fsType=xfs,zone=a "),
    ] {
        let got = translate_class(&class).unwrap();
        let parameters: Vec<_> = got.parameters.iter().flatten().map(|(k, v)| format!("{k}={v}")).collect();
        let terms = got.allowed_topologies.iter().flatten();
        let rules = terms.flat_map(|term| term.match_label_expressions.iter().flatten());
        let rules: Vec<_> = rules.map(|rule| format!("{}={}", rule.key, rule.values.join("|"))).collect();
        assert_eq!(format!("{} {}", parameters.join(","), rules.join(",")), want, "{case}");
        assert_eq!(got.provisioner, class.provisioner, "{case}: the provisioner stays");
    }
    let twice = class_of(AWS_EBS.plugin, &[("zone", "a")], &[(zone, &["b"])]);
    assert_eq!(translate_class(&twice).unwrap_err(), MigrateError::ZonesTwice);
}

/// A volume that a driver created, with this node affinity unless it is empty.
fn provisioned(
    driver: MigratedPlugin,
    handle: &str,
    attributes: &[(&str, &str)],
    affinity: &[(&str, &str)],
) -> PersistentVolume {
    let rule = |(key, value): &(&str, &str)| NodeSelectorRequirement {
        key: (*key).to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![(*value).to_owned()]),
    };
    let term = NodeSelectorTerm { match_expressions: Some(affinity.iter().map(rule).collect()), match_fields: None };
    let required = Some(NodeSelector { node_selector_terms: vec![term] });
    volume_of(PersistentVolumeSpec {
        csi: Some(CSIPersistentVolumeSource {
            driver: driver.driver.to_owned(),
            volume_handle: handle.to_owned(),
            fs_type: Some("ext4".to_owned()),
            volume_attributes: Some(attributes.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()),
            ..CSIPersistentVolumeSource::default()
        }),
        node_affinity: (!affinity.is_empty()).then_some(VolumeNodeAffinity { required }),
        ..PersistentVolumeSpec::default()
    })
}

#[test]
fn a_provisioned_volume_is_stored_in_tree_and_translates_back() {
    let disk = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/disks/d";
    for (migrated, handle, attributes, affinity, labels) in [
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
        let name = migrated.plugin;
        let old = to_in_tree_volume(migrated.plugin, provisioned(migrated, handle, attributes, affinity)).unwrap();
        assert!(old.spec.as_ref().unwrap().csi.is_none(), "{name}");
        let label_values: Vec<_> = old.metadata.labels.iter().flatten().map(|(_, value)| value.as_str()).collect();
        assert_eq!(label_values.join(" "), labels, "{name}");
        let source = csi_source(&old).unwrap().unwrap_or_else(|| panic!("{name}: no CSI driver"));
        assert_eq!(source.driver, migrated.driver, "{name}");
        let found = match migrated {
            GCE_PD => repair_handle(GCE_PD.driver, &source.volume_handle, "projects/p/zones/us-central1-a/instances/i")
                .unwrap(),
            VSPHERE => "id".to_owned(),
            _ => source.volume_handle.clone(),
        };
        assert_eq!(found, handle, "{name}: the handle of the driver");
    }
    let shared = provisioned(AZURE_FILE, "g#acc#share#", &[], &[]);
    let file = to_in_tree_volume(AZURE_FILE.plugin, shared).unwrap();
    assert_eq!(file.spec.unwrap().azure_file.unwrap().secret_name, "azure-storage-account-acc-secret");
    assert_eq!(file.metadata.annotations.unwrap()["kubernetes.io/azure-file-resource-group"], "g");
    let other = provisioned(AWS_EBS, "vol-1", &[], &[]);
    assert_eq!(to_in_tree_volume("x.test", other.clone()).unwrap(), other, "not migrated");
    for (migrated, handle, attributes) in [
        (GCE_PD, "d", &[][..]),
        (AZURE_DISK, "d", &[]),
        (AZURE_FILE, "share", &[]),
        (AWS_EBS, "v", &[("partition", "x")]),
    ] {
        assert!(
            to_in_tree_volume(migrated.plugin, provisioned(migrated, handle, attributes, &[])).is_err(),
            "{}: {handle}",
            migrated.plugin
        );
    }
}

#[test]
fn the_region_is_derived_from_the_zone() {
    for (zone, region) in [
        ("us-west-2a", Some("us-west-2")),
        ("us-gov-east-1a", Some("us-gov-east-1")),
        ("us-west-2-lax-1a", Some("us-west-2")),
        ("us-east-1-wl1-bos-wlz-1", Some("us-east-1")),
        ("somewhere", None),
    ] {
        let volume = provisioned(AWS_EBS, "vol-1", &[], &[("topology.ebs.csi.aws.com/zone", zone)]);
        let label =
            to_in_tree_volume(AWS_EBS.plugin, volume).ok().and_then(|v| v.metadata.labels?.get(label::REGION).cloned());
        assert_eq!(label.as_deref(), region, "{zone}");
    }
}
