//! Failed and hanging calls of the driver, and crashes of the agent.

use cleat_csi::Code;

use crate::rig::{Rig, condition, poll_until};
use crate::scripted::ScriptedResponse;

/// Starts the agent and creates a pod with an attached volume.
async fn pod_with_volume(rig: &mut Rig) -> String {
    let handle = rig.volume("data").await;
    rig.start();
    rig.serve_registration().await;
    rig.create_pod(rig.pod("p", &["data"])).await;
    rig.attach(&handle).await;
    handle
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn driver_calls_are_made_in_order() {
    let (mut rig, driver) = Rig::scripted().await;
    pod_with_volume(&mut rig).await;
    rig.wait_until_mounted("p").await;
    rig.create_pod(rig.pod("q", &["data"])).await;
    rig.wait_until_mounted("q").await;
    for pod in ["p", "q"] {
        rig.delete(pod).await;
        rig.wait_until_gone(pod).await;
    }
    rig.wait_until_unused().await;
    let want = ["stage", "publish p", "publish q", "unpublish p", "unpublish q", "unstage"];
    assert_eq!(rig.calls(&driver), want);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_stage_is_cleaned_up_reported_and_repeated() {
    let (mut rig, driver) = Rig::scripted().await;
    driver.push_response("stage", ScriptedResponse::Fail(Code::Internal));
    let handle = pod_with_volume(&mut rig).await;
    rig.api.wait_until("the failure is reported", async |api| condition(api, "p").await.1 == "MountFailed").await;
    let message = condition(&rig.api, "p").await.2;
    let want =
        "MountVolume.MountDevice failed for volume \"pv-data\" : rpc error: code = Internal desc = as the test says";
    assert!(message.contains(want), "{message}");
    assert!(!rig.staged(&handle).parent().unwrap().exists());
    rig.wait_until_mounted("p").await;
    assert_eq!(rig.calls(&driver), ["stage", "stage", "publish p"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_stage_needs_no_unstage() {
    let (mut rig, driver) = Rig::scripted().await;
    for _ in 0..20 {
        driver.push_response("stage", ScriptedResponse::Fail(Code::InvalidArgument));
    }
    pod_with_volume(&mut rig).await;
    rig.api.wait_until("the failure is reported", async |api| condition(api, "p").await.1 == "MountFailed").await;
    rig.delete("p").await;
    rig.wait_until_gone("p").await;
    rig.wait_until_unused().await;
    assert!(rig.calls(&driver).iter().all(|c| c == "stage"), "{:?}", rig.calls(&driver));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_without_answer_is_unpublished() {
    let (mut rig, driver) = Rig::scripted().await;
    for _ in 0..20 {
        driver.push_response("publish", ScriptedResponse::Fail(Code::Unavailable));
    }
    pod_with_volume(&mut rig).await;
    rig.api.wait_until("the failure is reported", async |api| condition(api, "p").await.1 == "MountFailed").await;
    assert!(rig.target("p", "data").parent().unwrap().join("vol_data.json").exists(), "it may be mounted");
    rig.delete("p").await;
    rig.wait_until_gone("p").await;
    rig.wait_until_unused().await;
    let calls = rig.calls(&driver);
    assert!(calls.ends_with(&["unpublish p".to_owned(), "unstage".to_owned()]), "{calls:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_failure_of_one_pod_does_not_delay_another() {
    let (mut rig, driver) = Rig::scripted().await;
    for _ in 0..50 {
        driver.push_response("publish", ScriptedResponse::Fail(Code::Internal));
    }
    pod_with_volume(&mut rig).await;
    rig.api.wait_until("the failure is reported", async |api| condition(api, "p").await.1 == "MountFailed").await;
    rig.create_pod(rig.pod("q", &["data"])).await;
    driver.wait_for_call(&format!("publish {}", rig.uid("q"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_unpublish_keeps_pod_and_stage_until_it_succeeds() {
    let (mut rig, driver) = Rig::scripted().await;
    pod_with_volume(&mut rig).await;
    rig.wait_until_mounted("p").await;
    driver.push_response("unpublish", ScriptedResponse::Fail(Code::Internal));
    rig.delete("p").await;
    rig.wait_until_gone("p").await;
    rig.wait_until_unused().await;
    assert_eq!(rig.calls(&driver), ["stage", "publish p", "unpublish p", "unpublish p", "unstage"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_interrupted_by_a_crash_is_undone_if_the_pod_is_gone() {
    for (during, want) in
        [("stage", &["stage", "unstage"][..]), ("publish", &["stage", "publish p", "unpublish p", "unstage"])]
    {
        let (mut rig, driver) = Rig::scripted().await;
        driver.push_response(during, ScriptedResponse::Hang);
        pod_with_volume(&mut rig).await;
        driver.wait_for_call(during).await;
        rig.crash().await;
        rig.api.force_delete("pods", "default", "p").await;
        rig.start();
        rig.wait_until_unused().await;
        assert_eq!(rig.calls(&driver), want, "crash during {during}");
        // The directory is removed after the volume has left volumesInUse.
        let dir = rig.pod_dir("p");
        poll_until(|| !dir.exists()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_interrupted_by_a_crash_is_repeated_if_the_pod_exists() {
    for during in ["stage", "publish"] {
        let (mut rig, driver) = Rig::scripted().await;
        driver.push_response(during, ScriptedResponse::Hang);
        pod_with_volume(&mut rig).await;
        driver.wait_for_call(during).await;
        rig.crash().await;
        rig.start();
        rig.wait_until_mounted("p").await;
        let calls = rig.calls(&driver);
        assert!(calls.iter().all(|c| !c.starts_with("un")), "{during}: {calls:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unmount_interrupted_by_a_crash_is_completed() {
    for during in ["unpublish", "unstage"] {
        let (mut rig, driver) = Rig::scripted().await;
        pod_with_volume(&mut rig).await;
        rig.wait_until_mounted("p").await;
        driver.push_response(during, ScriptedResponse::Hang);
        rig.delete("p").await;
        driver.wait_for_call(during).await;
        rig.crash().await;
        if during == "unpublish" {
            assert!(rig.api.get("pods", "default", "p").await.is_some(), "the Pod exists longer than the mount");
        }
        rig.start();
        rig.wait_until_gone("p").await;
        rig.wait_until_unused().await;
        assert_eq!(rig.calls(&driver).last().map(String::as_str), Some("unstage"), "crash during {during}");
    }
}
