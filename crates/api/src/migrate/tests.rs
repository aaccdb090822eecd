//! What the in-tree volumes of each cloud become, source by source.

use super::*;
use k8s_openapi::api::core::v1::*;

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
    let volume = crate::build::volume("v", "", "1Gi");
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
