//! FlexVolumes: the driver only says what it can do, the test attaches.

use cleat_api::flex::{ATTACHER, FlexVolume};
use cleat_api::names;
use cleat_controllers::attach::Policy;
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::rig::{Rig, claimed, create, patch_status, until};

const FLEX: &str = "acme/disk";

impl Rig {
    /// The FlexVolume driver [`FLEX`], which only says what it can do: the test attaches.
    fn install_flex(&self, capabilities: &str) {
        self.install_flex_script(&format!(r#"echo '{{"status":"Success","capabilities":{capabilities}}}'"#));
    }

    fn install_flex_script(&self, script: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        let home = self.dir.path().join("flex").join("acme~disk");
        std::fs::create_dir_all(&home).unwrap();
        std::fs::write(home.join(".new"), format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(home.join(".new"), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(home.join(".new"), home.join("disk")).unwrap();
    }

    /// A FlexVolume and a claim that are bound to each other.
    async fn flex_volume(&self, name: &str, modes: &[&str]) -> String {
        self.volume_of(name, modes, json!({ "flexVolume": { "driver": FLEX, "options": { "lun": "7" } } })).await;
        format!("flexvolume-{FLEX}/{name}")
    }

    fn flex_attachment(&self, volume: &str, node: &str) -> String {
        names::attachment(&format!("{FLEX}/{volume}"), ATTACHER, node)
    }

    /// What the attacher would write.
    async fn confirm_device(&self, attachment: &str, device: &str) {
        let status = json!({ "attached": true, "attachmentMetadata": { "devicePath": device } });
        patch_status(&self.all::<VolumeAttachment>(), attachment, json!({ "status": status })).await;
    }

    async fn told_device(&self, node: &str, unique: &str, device: &str) {
        until(&format!("{node} is told of {device}"), || async {
            let node = self.all::<Node>().get(node).await.unwrap();
            let attached = node.status.and_then(|s| s.volumes_attached).unwrap_or_default();
            attached.iter().any(|v| v.name == unique && v.device_path == device).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn flex_volumes_are_attached_to_one_node_and_the_node_is_told_the_device() {
    let rig = Rig::new().await;
    rig.install_flex("{}");
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.node("n2").await;
    let unique = rig.flex_volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", json!({ "persistentVolumeClaim": { "claimName": "v", "readOnly": true } })).await;
    let attachment = rig.flex_attachment("v", "n1");
    let made = rig.made(&attachment).await;
    assert_eq!(made.spec.attacher, "flexvolume.cleat.dev");
    let recorded = FlexVolume::from_attachment(&made).unwrap();
    assert_eq!((recorded.driver.as_str(), recorded.volume.as_str(), recorded.read_only), (FLEX, "v", true));
    assert_eq!(recorded.options["lun"], "7");
    rig.confirm_device(&attachment, "/dev/a").await;
    rig.told_device("n1", &unique, "/dev/a").await;
    rig.confirm_device(&attachment, "/dev/b").await;
    rig.told_device("n1", &unique, "/dev/b").await;

    rig.pod("heir", "n2", claimed("v")).await;
    rig.event("heir", "Volume is already used by pod(s) p").await;
    rig.status("n1", json!({ "volumesInUse": [unique] })).await;
    rig.forget_pod("p").await;
    rig.event("heir", "Volume is already exclusively attached to one node").await;
    rig.looked_around("w", "n1").await;
    rig.made(&attachment).await;
    rig.status("n1", json!({ "volumesInUse": null })).await;
    rig.gone(&attachment).await;
    rig.told("n1", &[]).await;
    rig.made(&rig.flex_attachment("v", "n2")).await;
}

#[tokio::test]
async fn a_pods_own_flex_volume_is_attached_too() {
    let rig = Rig::new().await;
    rig.install_flex("{}");
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.pod("p", "n1", json!({ "flexVolume": { "driver": FLEX } })).await;
    let attachment = rig.flex_attachment("data", "n1");
    rig.made(&attachment).await;
    rig.confirm_device(&attachment, "").await;
    rig.told("n1", &["flexvolume-acme/disk/data"]).await;
    rig.event("p", "AttachVolume.Attach succeeded for volume \"data\" ").await;
    rig.forget_pod("p").await;
    rig.gone(&attachment).await;
}

#[tokio::test]
async fn a_flex_driver_that_attaches_nothing_is_left_alone() {
    let rig = Rig::new().await;
    rig.install_flex(r#"{"attach":false}"#);
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.flex_volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", claimed("v")).await;
    rig.pod("q", "n1", json!({ "flexVolume": { "driver": FLEX } })).await;
    rig.looked_around("w", "n1").await;
    for volume in ["v", "data"] {
        let none = rig.all::<VolumeAttachment>().get_opt(&rig.flex_attachment(volume, "n1")).await.unwrap();
        assert!(none.is_none(), "{volume}");
    }
    // An update of the driver attaches, and the next one does not any more.
    rig.install_flex(r#"{"attach":true}"#);
    let attachment = rig.flex_attachment("v", "n1");
    rig.made(&attachment).await;
    rig.made(&rig.flex_attachment("data", "n1")).await;
    rig.install_flex(r#"{"attach":false}"#);
    rig.gone(&attachment).await;
}

#[tokio::test]
async fn a_flex_driver_that_is_missing_is_named_to_the_pod_and_takes_nothing_away() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.flex_volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", claimed("v")).await;
    let attachment = rig.flex_attachment("v", "n1");
    rig.made(&attachment).await;
    let error = json!({ "status": { "attached": false, "attachError": { "message": "there is no driver" } } });
    patch_status(&rig.all::<VolumeAttachment>(), &attachment, error).await;
    rig.event("p", "AttachVolume.Attach failed for volume \"v\" : there is no driver").await;
    rig.put_forward(121);
    rig.confirm_device(&attachment, "/dev/a").await;
    rig.told("n1", &["flexvolume-acme/disk/v"]).await;
}

#[tokio::test]
async fn while_a_flex_driver_starts_nothing_is_begun_and_nothing_taken_away() {
    let rig = Rig::new().await;
    let go = rig.dir.path().join("go");
    assert!(std::process::Command::new("mkfifo").arg(&go).status().unwrap().success());
    rig.install_flex_script(&format!(r#"cat {} > /dev/null; echo '{{"status":"Success"}}'"#, go.display()));
    rig.node("n1").await;
    rig.flex_volume("old", &["ReadWriteOnce"]).await;
    rig.flex_volume("new", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", claimed("old")).await;
    rig.pod("q", "n1", claimed("new")).await;
    // From before the restart.
    let volume = rig.all::<PersistentVolume>().get("old").await.unwrap();
    let recorded = FlexVolume::from_volume(&volume, false).unwrap().to_inline_spec();
    let old = rig.flex_attachment("old", "n1");
    let spec = json!({ "attacher": ATTACHER, "nodeName": "n1", "source": { "inlineVolumeSpec": recorded } });
    create(&rig.all::<VolumeAttachment>(), json!({ "metadata": { "name": old }, "spec": spec })).await;
    rig.start(Policy::default());
    rig.looked_around("w", "n1").await;
    let kept = rig.all::<VolumeAttachment>().get(&old).await.unwrap();
    assert!(kept.metadata.deletion_timestamp.is_none(), "nobody said that it is not attached");
    let new = rig.flex_attachment("new", "n1");
    assert!(rig.all::<VolumeAttachment>().get_opt(&new).await.unwrap().is_none(), "it may attach nothing");
    std::fs::write(&go, "").unwrap();
    rig.made(&new).await;
}

#[tokio::test]
async fn a_volume_that_is_taken_from_its_claim_leaves_the_node() {
    let rig = Rig::new().await;
    rig.install_flex("{}");
    rig.start(Policy::default());
    rig.node("n1").await;
    let unique = rig.flex_volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", claimed("v")).await;
    let attachment = rig.flex_attachment("v", "n1");
    rig.made(&attachment).await;
    rig.confirm_device(&attachment, "/dev/a").await;
    rig.told_device("n1", &unique, "/dev/a").await;
    // The pod stays, and nothing else happens that would bring the volume to mind.
    let free = Patch::Merge(json!({ "spec": { "claimRef": null } }));
    rig.all::<PersistentVolume>().patch("v", &PatchParams::default(), &free).await.unwrap();
    rig.gone(&attachment).await;
    rig.told("n1", &[]).await;
}
