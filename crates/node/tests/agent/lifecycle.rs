//! Mount, share, restart, and the way back.

use std::fs;

use cleat_drivers::block;
use serde_json::json;

use crate::api::Api;
use crate::rig::{NODE, Rig, condition, eventually, in_use, record};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_gets_its_volume_and_gives_it_back() {
    let mut rig = Rig::new().await;
    let handle = rig.volume("data").await;
    rig.start();
    rig.announce().await;
    rig.run(rig.pod("p", &["data"])).await;
    rig.api.until("the wait is told", async |api| condition(api, "p").await.1 == "NotAttached").await;
    assert!(rig.mounts().is_empty(), "nothing is mounted before it is attached");
    rig.attach(&handle).await;
    rig.until_mounted("p").await;

    let (staged, target) = (rig.staged(&handle), rig.target("p", "data"));
    fs::write(target.join("file"), "hello").unwrap();
    assert_eq!(fs::read_to_string(staged.join("file")).unwrap(), "hello");
    assert_eq!(record(&staged), json!({ "driverName": block::NAME, "volumeHandle": handle }));
    assert_eq!(record(&target)["specVolID"], "pv-data");
    assert_eq!(record(&target)["nodeName"], NODE);

    let csi_node = rig.api.get("csinodes", "", NODE).await.unwrap();
    assert_eq!(csi_node["spec"]["drivers"][0]["name"], block::NAME);
    let node = rig.api.get("nodes", "", NODE).await.unwrap();
    assert_eq!(
        node["metadata"]["annotations"]["csi.volume.kubernetes.io/nodeid"],
        json!({ block::NAME: NODE }).to_string()
    );
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], NODE);
    assert!(rig.api.get("leases", "kube-node-lease", NODE).await.is_some());

    rig.delete("p").await;
    rig.until_gone("p").await;
    assert!(!target.exists(), "the pod's object went after its mount");
    rig.until_unused().await;
    assert!(rig.mounts().is_empty() && !staged.parent().unwrap().exists());
    assert!(!rig.pod_dir("p").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_pods_share_one_stage_and_one_of_them_reads_only() {
    let mut rig = Rig::new().await;
    let handle = rig.volume("data").await;
    rig.start();
    rig.announce().await;
    rig.run(rig.pod("writer", &["data"])).await;
    rig.attach(&handle).await;
    rig.until_mounted("writer").await;
    let mut reader = rig.pod("reader", &["data"]);
    let volumes = reader.spec.as_mut().unwrap().volumes.as_mut().unwrap();
    volumes[0].persistent_volume_claim.as_mut().unwrap().read_only = Some(true);
    rig.run(reader).await;
    rig.until_mounted("reader").await;
    assert_eq!(rig.mounts().len(), 3, "one stage, two publishes");

    fs::write(rig.target("writer", "data").join("file"), "shared").unwrap();
    assert_eq!(fs::read_to_string(rig.target("reader", "data").join("file")).unwrap(), "shared");
    assert!(fs::write(rig.target("reader", "data").join("other"), "").is_err());

    rig.delete("writer").await;
    rig.until_gone("writer").await;
    assert_eq!(rig.mounts().len(), 2, "the reader keeps stage and publish");
    assert_eq!(fs::read_to_string(rig.target("reader", "data").join("file")).unwrap(), "shared");
    rig.delete("reader").await;
    rig.until_gone("reader").await;
    rig.until_unused().await;
    assert!(rig.mounts().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_leaves_wanted_mounts_alone_and_removes_the_rest() {
    let mut rig = Rig::new().await;
    let (kept, lost) = (rig.volume("kept").await, rig.volume("lost").await);
    rig.start();
    rig.announce().await;
    rig.run(rig.pod("stays", &["kept"])).await;
    rig.attach(&kept).await;
    rig.until_mounted("stays").await;
    let before = rig.mounts();
    rig.run(rig.pod("vanishes", &["lost"])).await;
    rig.attach(&lost).await;
    rig.until_mounted("vanishes").await;
    rig.stop().await;
    assert_eq!(rig.mounts().len(), 4, "a stop unmounts nothing");

    // Deleted by force while nobody was looking.
    rig.api.remove("pods", "default", "vanishes").await;
    rig.report_attached(&[&kept, &lost]).await;
    rig.start();
    rig.api.until("the lost pod's volume is given up", async |api| in_use(api).await.len() == 1).await;
    assert_eq!(rig.mounts(), before, "the same mounts, not new ones");
    assert_eq!(condition(&rig.api, "stays").await.0, "True");

    rig.delete("stays").await;
    rig.until_gone("stays").await;
    rig.until_unused().await;
    assert!(rig.mounts().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_deleted_while_the_agent_was_down_keeps_its_object_until_it_is_unmounted() {
    let mut rig = Rig::new().await;
    let handle = rig.volume("data").await;
    rig.start();
    rig.announce().await;
    rig.run(rig.pod("p", &["data"])).await;
    rig.attach(&handle).await;
    rig.until_mounted("p").await;
    rig.stop().await;
    rig.delete("p").await;
    rig.start();
    rig.until_gone("p").await;
    assert!(!rig.target("p", "data").exists());
    rig.until_unused().await;
    assert!(rig.mounts().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_without_attachment_needs_no_report() {
    let mut rig = Rig::without_attachment().await;
    let handle = rig.volume("data").await;
    rig.publish_to_node(&handle).await;
    rig.start();
    rig.announce().await;
    rig.run(rig.pod("p", &["data"])).await;
    rig.until_mounted("p").await;
    assert!(in_use(&rig.api).await.is_empty());
    rig.delete("p").await;
    rig.until_gone("p").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_mounted_is_told_and_what_can_be_is_mounted() {
    let mut rig = Rig::without_attachment().await;
    let handle = rig.volume("data").await;
    rig.publish_to_node(&handle).await;
    rig.start();
    let mut pod = serde_json::to_value(rig.pod("p", &["data"])).unwrap();
    pod["spec"]["volumes"].as_array_mut().unwrap().push(json!({ "name": "scratch", "emptyDir": {} }));
    let mount = json!({ "name": "scratch", "mountPath": "/tmp" });
    pod["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(mount);
    rig.run(pod).await;
    rig.api.until("the missing driver is told", async |api| condition(api, "p").await.1 == "DriverNotRegistered").await;
    rig.announce().await;
    rig.api
        .until("only the other kind of volume is left", async |api| condition(api, "p").await.1 == "UnsupportedVolume")
        .await;
    let told = condition(&rig.api, "p").await.2;
    assert!(told.contains("emptyDir") && !told.contains("v-data"), "{told}");
    // No write to the server tells when the mount is there.
    let target = rig.target("p", "data");
    eventually(|| cleat_host::mount::is_mount_point(&target).unwrap()).await;
    rig.delete("p").await;
    rig.until_gone("p").await;
    assert!(rig.mounts().iter().all(|(_, t)| *t != target));
}

async fn registered(api: &Api) -> bool {
    let node = api.get("nodes", "", NODE).await.unwrap_or_default();
    let ids = json!({ block::NAME: NODE }).to_string();
    let id = node["metadata"]["annotations"]["csi.volume.kubernetes.io/nodeid"] == ids.as_str();
    let csi_node = api.get("csinodes", "", NODE).await.unwrap_or_default();
    let owned = csi_node["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"];
    id && owned && csi_node["spec"]["drivers"][0]["name"] == block::NAME
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_is_entered_and_leaves_with_its_socket() {
    let mut rig = Rig::new().await;
    rig.start();
    rig.announce().await;
    rig.api.until("the driver is registered", registered).await;

    rig.api.remove("nodes", "", NODE).await;
    rig.api.until("a deleted Node comes back with its drivers", registered).await;

    std::fs::remove_file(rig.root().join("plugins_registry/block-reg.sock")).unwrap();
    let left = async |api: &Api| {
        let drivers = api.get("csinodes", "", NODE).await.unwrap_or_default()["spec"]["drivers"].clone();
        let annotations = api.get("nodes", "", NODE).await.unwrap_or_default()["metadata"]["annotations"].clone();
        drivers == json!([]) && annotations.get("csi.volume.kubernetes.io/nodeid").is_none()
    };
    rig.api.until("the driver left", left).await;
    rig.announce().await;
    rig.api.until("the driver is back", registered).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_when_nothing_changes() {
    let mut rig = Rig::new().await;
    let handle = rig.volume("data").await;
    rig.start();
    rig.announce().await;
    rig.api.until("the driver is registered", registered).await;
    rig.run(rig.pod("p", &["data"])).await;
    rig.attach(&handle).await;
    rig.until_mounted("p").await;
    let writes = rig.api.writes();
    let status = |w: &&String| w.ends_with("/pods/p/status") || w.ends_with(&format!("/nodes/{NODE}/status"));
    let writes: Vec<_> = writes.iter().filter(status).collect();
    // Node: at start, in use. Pod: not attached (if the attachment took that long), mounted.
    assert!(writes.len() <= 4, "{writes:?}");
    rig.delete("p").await;
    rig.until_gone("p").await;
    rig.until_unused().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_could_not_enter_its_drivers_tries_again() {
    let mut rig = Rig::new().await;
    rig.start();
    rig.announce().await;
    rig.api.until("the driver is registered", registered).await;
    rig.api.lose("/csinodes");
    rig.api.remove("nodes", "", NODE).await;
    rig.api.until("the Node is back with its drivers", registered).await;
    assert_eq!(rig.api.still_to_lose(), 0, "the first try failed");
}

/// Paused for too long, the node was taken for dead; it says itself that it is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_was_taken_for_dead_reports_itself_ready() {
    let mut rig = Rig::new().await;
    rig.start();
    let ready = async |api: &Api| {
        let node = api.get("nodes", "", NODE).await.unwrap_or_default();
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().find(|c| c["type"] == "Ready").map(|c| c["status"].clone()).unwrap_or_default()
    };
    rig.api.until("the node is ready", async |api| ready(api).await == "True").await;
    let unknown = json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] });
    rig.api.edit_status("nodes", "", NODE, unknown).await;
    rig.api.until("it says so again", async |api| ready(api).await == "True").await;
}
