//! Mount, share, restart and unmount volumes; register drivers; report the node.

use std::fs;

use cleat_drivers::block;
use serde_json::json;

use crate::api::Api;
use crate::rig::{NODE, Rig, condition, in_use, poll_until, record};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_mounted_for_a_pod_and_unmounted_with_it() {
    let mut rig = Rig::new().await;
    let handle = rig.volume("data").await;
    rig.start();
    rig.serve_registration().await;
    rig.create_pod(rig.pod("p", &["data"])).await;
    rig.api.wait_until("the wait is reported", async |api| condition(api, "p").await.1 == "NotAttached").await;
    assert!(rig.mounts().is_empty(), "nothing is mounted before it is attached");
    rig.attach(&handle).await;
    rig.wait_until_mounted("p").await;

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
    rig.wait_until_gone("p").await;
    assert!(!target.exists(), "the Pod was deleted after its mount");
    rig.wait_until_unused().await;
    assert!(rig.mounts().is_empty() && !staged.parent().unwrap().exists());
    assert!(!rig.pod_dir("p").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_pods_share_one_stage_and_one_of_them_reads_only() {
    let mut rig = Rig::new().await;
    let handle = rig.volume("data").await;
    rig.start();
    rig.serve_registration().await;
    rig.create_pod(rig.pod("writer", &["data"])).await;
    rig.attach(&handle).await;
    rig.wait_until_mounted("writer").await;
    let mut reader = rig.pod("reader", &["data"]);
    let volumes = reader.spec.as_mut().unwrap().volumes.as_mut().unwrap();
    volumes[0].persistent_volume_claim.as_mut().unwrap().read_only = Some(true);
    rig.create_pod(reader).await;
    rig.wait_until_mounted("reader").await;
    assert_eq!(rig.mounts().len(), 3, "one stage, two publishes");

    fs::write(rig.target("writer", "data").join("file"), "shared").unwrap();
    assert_eq!(fs::read_to_string(rig.target("reader", "data").join("file")).unwrap(), "shared");
    assert!(fs::write(rig.target("reader", "data").join("other"), "").is_err());

    rig.delete("writer").await;
    rig.wait_until_gone("writer").await;
    assert_eq!(rig.mounts().len(), 2, "the reader keeps stage and publish");
    assert_eq!(fs::read_to_string(rig.target("reader", "data").join("file")).unwrap(), "shared");
    rig.delete("reader").await;
    rig.wait_until_gone("reader").await;
    rig.wait_until_unused().await;
    assert!(rig.mounts().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_keeps_needed_mounts_and_removes_the_others() {
    let mut rig = Rig::new().await;
    let (needed, unneeded) = (rig.volume("needed").await, rig.volume("unneeded").await);
    rig.start();
    rig.serve_registration().await;
    rig.create_pod(rig.pod("stays", &["needed"])).await;
    rig.attach(&needed).await;
    rig.wait_until_mounted("stays").await;
    let before = rig.mounts();
    rig.create_pod(rig.pod("vanishes", &["unneeded"])).await;
    rig.attach(&unneeded).await;
    rig.wait_until_mounted("vanishes").await;
    rig.stop().await;
    assert_eq!(rig.mounts().len(), 4, "a stop unmounts nothing");

    // Force-deleted while the agent is stopped.
    rig.api.force_delete("pods", "default", "vanishes").await;
    rig.report_attached(&[&needed, &unneeded]).await;
    rig.start();
    rig.api
        .wait_until("the volume of the deleted pod is no longer in use", async |api| in_use(api).await.len() == 1)
        .await;
    assert_eq!(rig.mounts(), before, "the same mounts, not new ones");
    assert_eq!(condition(&rig.api, "stays").await.0, "True");

    rig.delete("stays").await;
    rig.wait_until_gone("stays").await;
    rig.wait_until_unused().await;
    assert!(rig.mounts().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_deleted_while_the_agent_was_down_exists_until_it_is_unmounted() {
    let mut rig = Rig::new().await;
    let handle = rig.volume("data").await;
    rig.start();
    rig.serve_registration().await;
    rig.create_pod(rig.pod("p", &["data"])).await;
    rig.attach(&handle).await;
    rig.wait_until_mounted("p").await;
    rig.stop().await;
    rig.delete("p").await;
    rig.start();
    rig.wait_until_gone("p").await;
    assert!(!rig.target("p", "data").exists());
    rig.wait_until_unused().await;
    assert!(rig.mounts().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_without_attachment_are_not_reported_in_use() {
    let mut rig = Rig::without_attachment().await;
    let handle = rig.volume("data").await;
    rig.publish_to_node(&handle).await;
    rig.start();
    rig.serve_registration().await;
    rig.create_pod(rig.pod("p", &["data"])).await;
    rig.wait_until_mounted("p").await;
    assert!(in_use(&rig.api).await.is_empty());
    rig.delete("p").await;
    rig.wait_until_gone("p").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsupported_volumes_are_reported_and_supported_ones_mounted() {
    let mut rig = Rig::without_attachment().await;
    let handle = rig.volume("data").await;
    rig.publish_to_node(&handle).await;
    rig.start();
    let mut pod = serde_json::to_value(rig.pod("p", &["data"])).unwrap();
    pod["spec"]["volumes"].as_array_mut().unwrap().push(json!({ "name": "scratch", "emptyDir": {} }));
    let mount = json!({ "name": "scratch", "mountPath": "/tmp" });
    pod["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(mount);
    rig.create_pod(pod).await;
    rig.api
        .wait_until("the missing driver is reported", async |api| condition(api, "p").await.1 == "DriverNotRegistered")
        .await;
    rig.serve_registration().await;
    rig.api
        .wait_until("only the unsupported volume is not mounted", async |api| {
            condition(api, "p").await.1 == "UnsupportedVolume"
        })
        .await;
    let message = condition(&rig.api, "p").await.2;
    assert!(message.contains("emptyDir") && !message.contains("v-data"), "{message}");
    // No API object shows when this volume is mounted.
    let target = rig.target("p", "data");
    poll_until(|| cleat_host::mount::is_mount_point(&target).unwrap()).await;
    rig.delete("p").await;
    rig.wait_until_gone("p").await;
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
async fn a_driver_is_registered_and_removed_with_its_socket() {
    let mut rig = Rig::new().await;
    rig.start();
    rig.serve_registration().await;
    rig.api.wait_until("the driver is registered", registered).await;

    rig.api.force_delete("nodes", "", NODE).await;
    rig.api.wait_until("a deleted Node comes back with its drivers", registered).await;

    std::fs::remove_file(rig.root().join("plugins_registry/block-reg.sock")).unwrap();
    let removed = async |api: &Api| {
        let drivers = api.get("csinodes", "", NODE).await.unwrap_or_default()["spec"]["drivers"].clone();
        let annotations = api.get("nodes", "", NODE).await.unwrap_or_default()["metadata"]["annotations"].clone();
        drivers == json!([]) && annotations.get("csi.volume.kubernetes.io/nodeid").is_none()
    };
    rig.api.wait_until("the driver is removed", removed).await;
    rig.serve_registration().await;
    rig.api.wait_until("the driver is registered again", registered).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_when_nothing_changes() {
    let mut rig = Rig::new().await;
    let handle = rig.volume("data").await;
    rig.start();
    rig.serve_registration().await;
    rig.api.wait_until("the driver is registered", registered).await;
    rig.create_pod(rig.pod("p", &["data"])).await;
    rig.attach(&handle).await;
    rig.wait_until_mounted("p").await;
    let writes = rig.api.writes();
    let status = |w: &&String| w.ends_with("/pods/p/status") || w.ends_with(&format!("/nodes/{NODE}/status"));
    let writes: Vec<_> = writes.iter().filter(status).collect();
    // Node: at start, in use. Pod: not attached (if the attachment took that long), mounted.
    assert!(writes.len() <= 4, "{writes:?}");
    rig.delete("p").await;
    rig.wait_until_gone("p").await;
    rig.wait_until_unused().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_registration_of_drivers_is_repeated() {
    let mut rig = Rig::new().await;
    rig.start();
    rig.serve_registration().await;
    rig.api.wait_until("the driver is registered", registered).await;
    rig.api.fail_next_writes("/csinodes");
    rig.api.force_delete("nodes", "", NODE).await;
    rig.api.wait_until("the Node is back with its drivers", registered).await;
    assert_eq!(rig.api.pending_failures(), 0, "the first try failed");
}

/// The node lifecycle controller has set Ready to Unknown, as it does if the process was paused for too long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_with_an_unknown_node_reports_it_ready() {
    let mut rig = Rig::new().await;
    rig.start();
    let ready = async |api: &Api| {
        let node = api.get("nodes", "", NODE).await.unwrap_or_default();
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().find(|c| c["type"] == "Ready").map(|c| c["status"].clone()).unwrap_or_default()
    };
    rig.api.wait_until("the node is ready", async |api| ready(api).await == "True").await;
    let unknown = json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] });
    rig.api.edit_status("nodes", "", NODE, unknown).await;
    rig.api.wait_until("the node is ready again", async |api| ready(api).await == "True").await;
}
