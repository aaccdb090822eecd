//! FlexVolumes. The driver only reports its capabilities; the test does the work of the attacher.

use cleat_api::flex::{ATTACHER, FlexVolume};
use cleat_api::names;
use cleat_controllers::attach::DetachPolicy;
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::fixture::{AttachFixture, claim_source};

const FLEX: &str = "acme/disk";

impl AttachFixture {
    /// Installs the FlexVolume driver [`FLEX`], which only reports its capabilities.
    fn install_flex(&self, capabilities: &str) {
        self.install_flex_script(&format!(r#"echo '{{"status":"Success","capabilities":{capabilities}}}'"#));
    }

    fn install_flex_script(&self, script: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        let home = self.server.directory().join("flex").join("acme~disk");
        std::fs::create_dir_all(&home).unwrap();
        std::fs::write(home.join(".new"), format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(home.join(".new"), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(home.join(".new"), home.join("disk")).unwrap();
    }

    /// Creates a FlexVolume and a claim that are bound to each other. Returns the unique volume name.
    async fn flex_volume(&self, name: &str, modes: &[&str]) -> String {
        self.volume_of(name, modes, json!({ "flexVolume": { "driver": FLEX, "options": { "lun": "7" } } })).await;
        format!("flexvolume-{FLEX}/{name}")
    }

    fn flex_attachment_name(&self, volume: &str, node: &str) -> String {
        names::attachment(&format!("{FLEX}/{volume}"), ATTACHER, node)
    }

    /// Writes what the attacher writes after a successful call.
    async fn confirm_device(&self, attachment: &str, device: &str) {
        let status = json!({ "attached": true, "attachmentMetadata": { "devicePath": device } });
        self.server.patch_status::<VolumeAttachment>(attachment, json!({ "status": status })).await;
    }

    async fn wait_reported_device(&self, node: &str, unique_name: &str, device: &str) {
        let reported = |node: &Node| {
            let attached = node.status.as_ref().and_then(|s| s.volumes_attached.as_ref());
            attached.into_iter().flatten().any(|v| v.name == unique_name && v.device_path == device)
        };
        self.server.wait_until(node, &format!("reports the device {device}"), reported).await;
    }
}

#[tokio::test]
async fn flex_volumes_are_attached_to_one_node_and_the_node_reports_the_device() {
    let fixture = AttachFixture::new().await;
    fixture.install_flex("{}");
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.node("n2").await;
    let unique_name = fixture.flex_volume("v", &["ReadWriteOnce"]).await;
    fixture.pod("p", "n1", json!({ "persistentVolumeClaim": { "claimName": "v", "readOnly": true } })).await;
    let attachment = fixture.flex_attachment_name("v", "n1");
    let created = fixture.wait_attachment(&attachment).await;
    assert_eq!(created.spec.attacher, "flexvolume.cleat.dev");
    let recorded = FlexVolume::from_attachment(&created).unwrap();
    assert_eq!((recorded.driver.as_str(), recorded.volume.as_str(), recorded.read_only), (FLEX, "v", true));
    assert_eq!(recorded.options["lun"], "7");
    fixture.confirm_device(&attachment, "/dev/a").await;
    fixture.wait_reported_device("n1", &unique_name, "/dev/a").await;
    fixture.confirm_device(&attachment, "/dev/b").await;
    fixture.wait_reported_device("n1", &unique_name, "/dev/b").await;

    fixture.pod("next", "n2", claim_source("v")).await;
    fixture.wait_event("next", "Volume is already used by pod(s) p").await;
    fixture.status("n1", json!({ "volumesInUse": [unique_name] })).await;
    fixture.delete_pod("p").await;
    fixture.wait_event("next", "Volume is already exclusively attached to one node").await;
    fixture.wait_reconciled("w", "n1").await;
    fixture.wait_attachment(&attachment).await;
    fixture.status("n1", json!({ "volumesInUse": null })).await;
    fixture.wait_deleted(&attachment).await;
    fixture.wait_reported("n1", &[]).await;
    fixture.wait_attachment(&fixture.flex_attachment_name("v", "n2")).await;
}

#[tokio::test]
async fn an_inline_flex_volume_is_attached() {
    let fixture = AttachFixture::new().await;
    fixture.install_flex("{}");
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.pod("p", "n1", json!({ "flexVolume": { "driver": FLEX } })).await;
    let attachment = fixture.flex_attachment_name("data", "n1");
    fixture.wait_attachment(&attachment).await;
    fixture.confirm_device(&attachment, "").await;
    fixture.wait_reported("n1", &["flexvolume-acme/disk/data"]).await;
    fixture.wait_event("p", "AttachVolume.Attach succeeded for volume \"data\" ").await;
    fixture.delete_pod("p").await;
    fixture.wait_deleted(&attachment).await;
}

#[tokio::test]
async fn volumes_of_a_flex_driver_without_the_attach_capability_are_not_attached() {
    let fixture = AttachFixture::new().await;
    fixture.install_flex(r#"{"attach":false}"#);
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.flex_volume("v", &["ReadWriteOnce"]).await;
    fixture.pod("p", "n1", claim_source("v")).await;
    fixture.pod("q", "n1", json!({ "flexVolume": { "driver": FLEX } })).await;
    fixture.wait_reconciled("w", "n1").await;
    for volume in ["v", "data"] {
        let none = fixture
            .server
            .api::<VolumeAttachment>()
            .get_opt(&fixture.flex_attachment_name(volume, "n1"))
            .await
            .unwrap();
        assert!(none.is_none(), "{volume}");
    }
    // The driver is replaced by one with the capability, and that by one without it.
    fixture.install_flex(r#"{"attach":true}"#);
    let attachment = fixture.flex_attachment_name("v", "n1");
    fixture.wait_attachment(&attachment).await;
    fixture.wait_attachment(&fixture.flex_attachment_name("data", "n1")).await;
    fixture.install_flex(r#"{"attach":false}"#);
    fixture.wait_deleted(&attachment).await;
}

#[tokio::test]
async fn a_missing_flex_driver_is_reported_to_the_pod_and_causes_no_detach() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.flex_volume("v", &["ReadWriteOnce"]).await;
    fixture.pod("p", "n1", claim_source("v")).await;
    let attachment = fixture.flex_attachment_name("v", "n1");
    fixture.wait_attachment(&attachment).await;
    let error = json!({ "status": { "attached": false, "attachError": { "message": "there is no driver" } } });
    fixture.server.patch_status::<VolumeAttachment>(&attachment, error).await;
    fixture.wait_event("p", "AttachVolume.Attach failed for volume \"v\" : there is no driver").await;
    fixture.clock.advance(121);
    fixture.confirm_device(&attachment, "/dev/a").await;
    fixture.wait_reported("n1", &["flexvolume-acme/disk/v"]).await;
}

#[tokio::test]
async fn while_a_flex_driver_starts_its_volumes_are_neither_attached_nor_detached() {
    let fixture = AttachFixture::new().await;
    let go = fixture.server.directory().join("go");
    assert!(std::process::Command::new("mkfifo").arg(&go).status().unwrap().success());
    fixture.install_flex_script(&format!(r#"cat {} > /dev/null; echo '{{"status":"Success"}}'"#, go.display()));
    fixture.node("n1").await;
    fixture.flex_volume("old", &["ReadWriteOnce"]).await;
    fixture.flex_volume("new", &["ReadWriteOnce"]).await;
    fixture.pod("p", "n1", claim_source("old")).await;
    fixture.pod("q", "n1", claim_source("new")).await;
    // An attachment from before the restart.
    let volume = fixture.server.api::<PersistentVolume>().get("old").await.unwrap();
    let recorded = FlexVolume::from_volume(&volume, false).unwrap().to_inline_spec();
    let old = fixture.flex_attachment_name("old", "n1");
    let spec = json!({ "attacher": ATTACHER, "nodeName": "n1", "source": { "inlineVolumeSpec": recorded } });
    fixture.server.create::<VolumeAttachment>(json!({ "metadata": { "name": old }, "spec": spec })).await;
    fixture.start(DetachPolicy::default());
    fixture.wait_reconciled("w", "n1").await;
    let kept = fixture.server.api::<VolumeAttachment>().get(&old).await.unwrap();
    assert!(kept.metadata.deletion_timestamp.is_none(), "the driver has not said that it does not attach");
    let new = fixture.flex_attachment_name("new", "n1");
    assert!(
        fixture.server.api::<VolumeAttachment>().get_opt(&new).await.unwrap().is_none(),
        "the driver may turn out not to attach"
    );
    std::fs::write(&go, "").unwrap();
    fixture.wait_attachment(&new).await;
}

#[tokio::test]
async fn a_volume_whose_claim_ref_is_removed_is_detached() {
    let fixture = AttachFixture::new().await;
    fixture.install_flex("{}");
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    let unique_name = fixture.flex_volume("v", &["ReadWriteOnce"]).await;
    fixture.pod("p", "n1", claim_source("v")).await;
    let attachment = fixture.flex_attachment_name("v", "n1");
    fixture.wait_attachment(&attachment).await;
    fixture.confirm_device(&attachment, "/dev/a").await;
    fixture.wait_reported_device("n1", &unique_name, "/dev/a").await;
    // The pod stays: only the change of the PersistentVolume can cause the detach.
    let free = Patch::Merge(json!({ "spec": { "claimRef": null } }));
    fixture.server.api::<PersistentVolume>().patch("v", &PatchParams::default(), &free).await.unwrap();
    fixture.wait_deleted(&attachment).await;
    fixture.wait_reported("n1", &[]).await;
}
