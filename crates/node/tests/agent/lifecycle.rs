//! Mount, share, restart and unmount volumes; register drivers; report the node.

use std::fs;

use cleat_drivers::block;
use cleat_testing::wait::wait_until;
use serde_json::json;

use crate::fixture::{NODE, NodeFixture, condition, in_use, record};
use crate::json_api::JsonApi;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_mounted_for_a_pod_and_unmounted_with_it() {
    let mut fixture = NodeFixture::new().await;
    let handle = fixture.volume("data").await;
    fixture.start();
    fixture.serve_registration().await;
    fixture.create_pod(fixture.pod("p", &["data"])).await;
    fixture.api.wait_until("the wait is reported", async |api| condition(api, "p").await.1 == "NotAttached").await;
    assert!(fixture.mounts().is_empty(), "nothing is mounted before it is attached");
    fixture.attach(&handle).await;
    fixture.wait_until_mounted("p").await;

    let (staged, target) = (fixture.staged(&handle), fixture.target("p", "data"));
    fs::write(target.join("file"), "hello").unwrap();
    assert_eq!(fs::read_to_string(staged.join("file")).unwrap(), "hello");
    assert_eq!(record(&staged), json!({ "driverName": block::NAME, "volumeHandle": handle }));
    assert_eq!(record(&target)["specVolID"], "pv-data");
    assert_eq!(record(&target)["nodeName"], NODE);

    let csi_node = fixture.api.get("csinodes", "", NODE).await.unwrap();
    assert_eq!(csi_node["spec"]["drivers"][0]["name"], block::NAME);
    let node = fixture.api.get("nodes", "", NODE).await.unwrap();
    assert_eq!(
        node["metadata"]["annotations"]["csi.volume.kubernetes.io/nodeid"],
        json!({ block::NAME: NODE }).to_string()
    );
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], NODE);
    assert!(fixture.api.get("leases", "kube-node-lease", NODE).await.is_some());

    fixture.delete("p").await;
    fixture.wait_until_gone("p").await;
    assert!(!target.exists(), "the Pod was deleted after its mount");
    fixture.wait_until_unused().await;
    assert!(fixture.mounts().is_empty() && !staged.parent().unwrap().exists());
    assert!(!fixture.pod_dir("p").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_pods_share_one_stage_and_one_of_them_reads_only() {
    let mut fixture = NodeFixture::new().await;
    let handle = fixture.volume("data").await;
    fixture.start();
    fixture.serve_registration().await;
    fixture.create_pod(fixture.pod("writer", &["data"])).await;
    fixture.attach(&handle).await;
    fixture.wait_until_mounted("writer").await;
    let mut reader = fixture.pod("reader", &["data"]);
    let volumes = reader.spec.as_mut().unwrap().volumes.as_mut().unwrap();
    volumes[0].persistent_volume_claim.as_mut().unwrap().read_only = Some(true);
    fixture.create_pod(reader).await;
    fixture.wait_until_mounted("reader").await;
    assert_eq!(fixture.mounts().len(), 3, "one stage, two publishes");

    fs::write(fixture.target("writer", "data").join("file"), "shared").unwrap();
    assert_eq!(fs::read_to_string(fixture.target("reader", "data").join("file")).unwrap(), "shared");
    assert!(fs::write(fixture.target("reader", "data").join("other"), "").is_err());

    fixture.delete("writer").await;
    fixture.wait_until_gone("writer").await;
    assert_eq!(fixture.mounts().len(), 2, "the reader keeps stage and publish");
    assert_eq!(fs::read_to_string(fixture.target("reader", "data").join("file")).unwrap(), "shared");
    fixture.delete("reader").await;
    fixture.wait_until_gone("reader").await;
    fixture.wait_until_unused().await;
    assert!(fixture.mounts().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_keeps_needed_mounts_and_removes_the_others() {
    let mut fixture = NodeFixture::new().await;
    let (needed, unneeded) = (fixture.volume("needed").await, fixture.volume("unneeded").await);
    fixture.start();
    fixture.serve_registration().await;
    fixture.create_pod(fixture.pod("stays", &["needed"])).await;
    fixture.attach(&needed).await;
    fixture.wait_until_mounted("stays").await;
    let before = fixture.mounts();
    fixture.create_pod(fixture.pod("vanishes", &["unneeded"])).await;
    fixture.attach(&unneeded).await;
    fixture.wait_until_mounted("vanishes").await;
    fixture.stop().await;
    assert_eq!(fixture.mounts().len(), 4, "a stop unmounts nothing");

    // Force-deleted while the agent is stopped.
    fixture.api.force_delete("pods", "default", "vanishes").await;
    fixture.report_attached(&[&needed, &unneeded]).await;
    fixture.start();
    fixture
        .api
        .wait_until("the volume of the deleted pod is no longer in use", async |api| in_use(api).await.len() == 1)
        .await;
    assert_eq!(fixture.mounts(), before, "the same mounts, not new ones");
    assert_eq!(condition(&fixture.api, "stays").await.0, "True");

    fixture.delete("stays").await;
    fixture.wait_until_gone("stays").await;
    fixture.wait_until_unused().await;
    assert!(fixture.mounts().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_deleted_while_the_agent_was_down_exists_until_it_is_unmounted() {
    let mut fixture = NodeFixture::new().await;
    let handle = fixture.volume("data").await;
    fixture.start();
    fixture.serve_registration().await;
    fixture.create_pod(fixture.pod("p", &["data"])).await;
    fixture.attach(&handle).await;
    fixture.wait_until_mounted("p").await;
    fixture.stop().await;
    fixture.delete("p").await;
    fixture.start();
    fixture.wait_until_gone("p").await;
    assert!(!fixture.target("p", "data").exists());
    fixture.wait_until_unused().await;
    assert!(fixture.mounts().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_without_attachment_are_not_reported_in_use() {
    let mut fixture = NodeFixture::without_attachment().await;
    let handle = fixture.volume("data").await;
    fixture.publish_to_node(&handle).await;
    fixture.start();
    fixture.serve_registration().await;
    fixture.create_pod(fixture.pod("p", &["data"])).await;
    fixture.wait_until_mounted("p").await;
    assert!(in_use(&fixture.api).await.is_empty());
    fixture.delete("p").await;
    fixture.wait_until_gone("p").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsupported_volumes_are_reported_and_supported_ones_mounted() {
    let mut fixture = NodeFixture::without_attachment().await;
    let handle = fixture.volume("data").await;
    fixture.publish_to_node(&handle).await;
    fixture.start();
    let mut pod = serde_json::to_value(fixture.pod("p", &["data"])).unwrap();
    pod["spec"]["volumes"].as_array_mut().unwrap().push(json!({ "name": "scratch", "emptyDir": {} }));
    let mount = json!({ "name": "scratch", "mountPath": "/tmp" });
    pod["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(mount);
    fixture.create_pod(pod).await;
    fixture
        .api
        .wait_until("the missing driver is reported", async |api| condition(api, "p").await.1 == "DriverNotRegistered")
        .await;
    fixture.serve_registration().await;
    fixture
        .api
        .wait_until("only the unsupported volume is not mounted", async |api| {
            condition(api, "p").await.1 == "UnsupportedVolume"
        })
        .await;
    let message = condition(&fixture.api, "p").await.2;
    assert!(message.contains("emptyDir") && !message.contains("v-data"), "{message}");
    // No API object shows when this volume is mounted.
    let target = fixture.target("p", "data");
    wait_until("the volume is mounted", async || cleat_host::mount::is_mount_point(&target).unwrap()).await;
    fixture.delete("p").await;
    fixture.wait_until_gone("p").await;
    assert!(fixture.mounts().iter().all(|(_, t)| *t != target));
}

async fn registered(api: &JsonApi) -> bool {
    let node = api.get("nodes", "", NODE).await.unwrap_or_default();
    let ids = json!({ block::NAME: NODE }).to_string();
    let id = node["metadata"]["annotations"]["csi.volume.kubernetes.io/nodeid"] == ids.as_str();
    let csi_node = api.get("csinodes", "", NODE).await.unwrap_or_default();
    let owned = csi_node["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"];
    id && owned && csi_node["spec"]["drivers"][0]["name"] == block::NAME
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_is_registered_and_removed_with_its_socket() {
    let mut fixture = NodeFixture::new().await;
    fixture.start();
    fixture.serve_registration().await;
    fixture.api.wait_until("the driver is registered", registered).await;

    fixture.api.force_delete("nodes", "", NODE).await;
    fixture.api.wait_until("a deleted Node comes back with its drivers", registered).await;

    std::fs::remove_file(fixture.root().join("plugins_registry/block-reg.sock")).unwrap();
    let removed = async |api: &JsonApi| {
        let drivers = api.get("csinodes", "", NODE).await.unwrap_or_default()["spec"]["drivers"].clone();
        let annotations = api.get("nodes", "", NODE).await.unwrap_or_default()["metadata"]["annotations"].clone();
        drivers == json!([]) && annotations.get("csi.volume.kubernetes.io/nodeid").is_none()
    };
    fixture.api.wait_until("the driver is removed", removed).await;
    fixture.serve_registration().await;
    fixture.api.wait_until("the driver is registered again", registered).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_when_nothing_changes() {
    let mut fixture = NodeFixture::new().await;
    let handle = fixture.volume("data").await;
    fixture.start();
    fixture.serve_registration().await;
    fixture.api.wait_until("the driver is registered", registered).await;
    fixture.create_pod(fixture.pod("p", &["data"])).await;
    fixture.attach(&handle).await;
    fixture.wait_until_mounted("p").await;
    let writes = fixture.api.writes();
    let status = |w: &&String| w.ends_with("/pods/p/status") || w.ends_with(&format!("/nodes/{NODE}/status"));
    let writes: Vec<_> = writes.iter().filter(status).collect();
    // Node: at start, in use. Pod: not attached (if the attachment took that long), mounted.
    assert!(writes.len() <= 4, "{writes:?}");
    fixture.delete("p").await;
    fixture.wait_until_gone("p").await;
    fixture.wait_until_unused().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_registration_of_drivers_is_repeated() {
    let mut fixture = NodeFixture::new().await;
    fixture.start();
    fixture.serve_registration().await;
    fixture.api.wait_until("the driver is registered", registered).await;
    fixture.api.fail_next_writes("/csinodes");
    fixture.api.force_delete("nodes", "", NODE).await;
    fixture.api.wait_until("the Node is back with its drivers", registered).await;
    assert_eq!(fixture.api.pending_failures(), 0, "the first try failed");
}

/// The node lifecycle controller has set Ready to Unknown, as it does if the process was paused for too long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_with_an_unknown_node_reports_it_ready() {
    let mut fixture = NodeFixture::new().await;
    fixture.start();
    let ready = async |api: &JsonApi| {
        let node = api.get("nodes", "", NODE).await.unwrap_or_default();
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().find(|c| c["type"] == "Ready").map(|c| c["status"].clone()).unwrap_or_default()
    };
    fixture.api.wait_until("the node is ready", async |api| ready(api).await == "True").await;
    let unknown = json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] });
    fixture.api.edit_status("nodes", "", NODE, unknown).await;
    fixture.api.wait_until("the node is ready again", async |api| ready(api).await == "True").await;
}
