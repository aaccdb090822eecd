//! Failed and hanging calls of the driver, and crashes of the agent.

use cleat_csi::Code;
use cleat_testing::wait::wait_until;
use cleat_testing::{Method, NodeCall, ScriptedDriver, ScriptedReply};
use tonic::Status;

use crate::fixture::{NodeFixture, condition};

/// A failed call.
fn fail(code: Code) -> ScriptedReply {
    ScriptedReply::Fail(Status::new(code, "as the test says"))
}

/// Waits for a call whose path contains `part`.
async fn wait_for_call(driver: &ScriptedDriver, method: Method, part: &str) {
    let is_called = |call: &NodeCall| call.method == method && call.path.contains(part);
    driver.wait_until(&format!("{method:?}"), |state| state.node_calls.iter().any(is_called)).await;
}

/// Starts the agent and creates a pod with an attached volume.
async fn pod_with_volume(fixture: &mut NodeFixture) -> String {
    let handle = fixture.volume("data").await;
    fixture.start();
    fixture.serve_registration().await;
    fixture.create_pod(fixture.pod("p", &["data"])).await;
    fixture.attach(&handle).await;
    handle
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn driver_calls_are_made_in_order() {
    let (mut fixture, driver) = NodeFixture::scripted().await;
    pod_with_volume(&mut fixture).await;
    fixture.wait_until_mounted("p").await;
    fixture.create_pod(fixture.pod("q", &["data"])).await;
    fixture.wait_until_mounted("q").await;
    for pod in ["p", "q"] {
        fixture.delete(pod).await;
        fixture.wait_until_gone(pod).await;
    }
    fixture.wait_until_unused().await;
    let want = ["stage", "publish p", "publish q", "unpublish p", "unpublish q", "unstage"];
    assert_eq!(fixture.calls(&driver), want);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_stage_is_cleaned_up_reported_and_repeated() {
    let (mut fixture, driver) = NodeFixture::scripted().await;
    driver.script(Method::NodeStageVolume, [fail(Code::Internal)]);
    let handle = pod_with_volume(&mut fixture).await;
    fixture.api.wait_until("the failure is reported", async |api| condition(api, "p").await.1 == "MountFailed").await;
    let message = condition(&fixture.api, "p").await.2;
    let want =
        "MountVolume.MountDevice failed for volume \"pv-data\" : rpc error: code = Internal desc = as the test says";
    assert!(message.contains(want), "{message}");
    assert!(!fixture.staged(&handle).parent().unwrap().exists());
    fixture.wait_until_mounted("p").await;
    assert_eq!(fixture.calls(&driver), ["stage", "stage", "publish p"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_stage_needs_no_unstage() {
    let (mut fixture, driver) = NodeFixture::scripted().await;
    driver.script(Method::NodeStageVolume, std::iter::repeat_n(fail(Code::InvalidArgument), 20));
    pod_with_volume(&mut fixture).await;
    fixture.api.wait_until("the failure is reported", async |api| condition(api, "p").await.1 == "MountFailed").await;
    fixture.delete("p").await;
    fixture.wait_until_gone("p").await;
    fixture.wait_until_unused().await;
    assert!(fixture.calls(&driver).iter().all(|c| c == "stage"), "{:?}", fixture.calls(&driver));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_without_answer_is_unpublished() {
    let (mut fixture, driver) = NodeFixture::scripted().await;
    driver.script(Method::NodePublishVolume, std::iter::repeat_n(fail(Code::Unavailable), 20));
    pod_with_volume(&mut fixture).await;
    fixture.api.wait_until("the failure is reported", async |api| condition(api, "p").await.1 == "MountFailed").await;
    assert!(fixture.target("p", "data").parent().unwrap().join("vol_data.json").exists(), "it may be mounted");
    fixture.delete("p").await;
    fixture.wait_until_gone("p").await;
    fixture.wait_until_unused().await;
    let calls = fixture.calls(&driver);
    assert!(calls.ends_with(&["unpublish p".to_owned(), "unstage".to_owned()]), "{calls:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_failure_of_one_pod_does_not_delay_another() {
    let (mut fixture, driver) = NodeFixture::scripted().await;
    driver.script(Method::NodePublishVolume, std::iter::repeat_n(fail(Code::Internal), 50));
    pod_with_volume(&mut fixture).await;
    fixture.api.wait_until("the failure is reported", async |api| condition(api, "p").await.1 == "MountFailed").await;
    fixture.create_pod(fixture.pod("q", &["data"])).await;
    wait_for_call(&driver, Method::NodePublishVolume, &fixture.uid("q")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_unpublish_keeps_pod_and_stage_until_it_succeeds() {
    let (mut fixture, driver) = NodeFixture::scripted().await;
    pod_with_volume(&mut fixture).await;
    fixture.wait_until_mounted("p").await;
    driver.script(Method::NodeUnpublishVolume, [fail(Code::Internal)]);
    fixture.delete("p").await;
    fixture.wait_until_gone("p").await;
    fixture.wait_until_unused().await;
    assert_eq!(fixture.calls(&driver), ["stage", "publish p", "unpublish p", "unpublish p", "unstage"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_interrupted_by_a_crash_is_undone_if_the_pod_is_gone() {
    for (during, want) in [
        (Method::NodeStageVolume, &["stage", "unstage"][..]),
        (Method::NodePublishVolume, &["stage", "publish p", "unpublish p", "unstage"]),
    ] {
        let (mut fixture, driver) = NodeFixture::scripted().await;
        driver.script(during, [ScriptedReply::Hang]);
        pod_with_volume(&mut fixture).await;
        wait_for_call(&driver, during, "").await;
        fixture.crash().await;
        fixture.api.force_delete("pods", "default", "p").await;
        fixture.start();
        fixture.wait_until_unused().await;
        assert_eq!(fixture.calls(&driver), want, "crash during {during:?}");
        // The directory is removed after the volume has left volumesInUse.
        let dir = fixture.pod_dir("p");
        wait_until("the directory of the pod is removed", async || !dir.exists()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_interrupted_by_a_crash_is_repeated_if_the_pod_exists() {
    for during in [Method::NodeStageVolume, Method::NodePublishVolume] {
        let (mut fixture, driver) = NodeFixture::scripted().await;
        driver.script(during, [ScriptedReply::Hang]);
        pod_with_volume(&mut fixture).await;
        wait_for_call(&driver, during, "").await;
        fixture.crash().await;
        fixture.start();
        fixture.wait_until_mounted("p").await;
        let calls = fixture.calls(&driver);
        assert!(calls.iter().all(|c| !c.starts_with("un")), "{during:?}: {calls:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unmount_interrupted_by_a_crash_is_completed() {
    for during in [Method::NodeUnpublishVolume, Method::NodeUnstageVolume] {
        let (mut fixture, driver) = NodeFixture::scripted().await;
        pod_with_volume(&mut fixture).await;
        fixture.wait_until_mounted("p").await;
        driver.script(during, [ScriptedReply::Hang]);
        fixture.delete("p").await;
        wait_for_call(&driver, during, "").await;
        fixture.crash().await;
        if during == Method::NodeUnpublishVolume {
            assert!(fixture.api.get("pods", "default", "p").await.is_some(), "the Pod exists longer than the mount");
        }
        fixture.start();
        fixture.wait_until_gone("p").await;
        fixture.wait_until_unused().await;
        assert_eq!(fixture.calls(&driver).last().map(String::as_str), Some("unstage"), "crash during {during:?}");
    }
}
