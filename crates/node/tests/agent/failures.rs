//! What a driver's refusals, silences and the agent's own death leave behind.

use cleat_csi::Code;

use crate::rig::{Rig, condition, eventually};
use crate::scripted::Answer;

/// An attached volume and a pod that wants it; the driver answers as told.
async fn pod_with_volume(rig: &mut Rig) -> String {
    let handle = rig.volume("data").await;
    rig.start();
    rig.announce().await;
    rig.run(rig.pod("p", &["data"])).await;
    rig.attach(&handle).await;
    handle
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_calls_come_in_order() {
    let (mut rig, driver) = Rig::scripted().await;
    pod_with_volume(&mut rig).await;
    rig.until_mounted("p").await;
    rig.run(rig.pod("q", &["data"])).await;
    rig.until_mounted("q").await;
    for pod in ["p", "q"] {
        rig.delete(pod).await;
        rig.until_gone(pod).await;
    }
    rig.until_unused().await;
    let want = ["stage", "publish p", "publish q", "unpublish p", "unpublish q", "unstage"];
    assert_eq!(rig.calls(&driver), want);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_stage_leaves_nothing_and_is_told_and_repeated() {
    let (mut rig, driver) = Rig::scripted().await;
    driver.next("stage", Answer::Fail(Code::Internal));
    let handle = pod_with_volume(&mut rig).await;
    rig.api.until("the failure is told", async |api| condition(api, "p").await.1 == "MountFailed").await;
    let told = condition(&rig.api, "p").await.2;
    let want =
        "MountVolume.MountDevice failed for volume \"pv-data\" : rpc error: code = Internal desc = as the test says";
    assert!(told.contains(want), "{told}");
    assert!(!rig.staged(&handle).parent().unwrap().exists());
    rig.until_mounted("p").await;
    assert_eq!(rig.calls(&driver), ["stage", "stage", "publish p"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_stage_needs_no_unstage() {
    let (mut rig, driver) = Rig::scripted().await;
    for _ in 0..20 {
        driver.next("stage", Answer::Fail(Code::InvalidArgument));
    }
    pod_with_volume(&mut rig).await;
    rig.api.until("the failure is told", async |api| condition(api, "p").await.1 == "MountFailed").await;
    rig.delete("p").await;
    rig.until_gone("p").await;
    rig.until_unused().await;
    assert!(rig.calls(&driver).iter().all(|c| c == "stage"), "{:?}", rig.calls(&driver));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unanswered_publish_is_taken_back() {
    let (mut rig, driver) = Rig::scripted().await;
    for _ in 0..20 {
        driver.next("publish", Answer::Fail(Code::Unavailable));
    }
    pod_with_volume(&mut rig).await;
    rig.api.until("the failure is told", async |api| condition(api, "p").await.1 == "MountFailed").await;
    assert!(rig.target("p", "data").parent().unwrap().join("vol_data.json").exists(), "it may be mounted");
    rig.delete("p").await;
    rig.until_gone("p").await;
    rig.until_unused().await;
    let calls = rig.calls(&driver);
    assert!(calls.ends_with(&["unpublish p".to_owned(), "unstage".to_owned()]), "{calls:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_pods_failure_does_not_hold_up_the_next() {
    let (mut rig, driver) = Rig::scripted().await;
    for _ in 0..50 {
        driver.next("publish", Answer::Fail(Code::Internal));
    }
    pod_with_volume(&mut rig).await;
    rig.api.until("the failure is told", async |api| condition(api, "p").await.1 == "MountFailed").await;
    rig.run(rig.pod("q", &["data"])).await;
    driver.until_called(&format!("publish {}", rig.uid("q"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_unpublish_keeps_pod_and_stage_until_it_succeeds() {
    let (mut rig, driver) = Rig::scripted().await;
    pod_with_volume(&mut rig).await;
    rig.until_mounted("p").await;
    driver.next("unpublish", Answer::Fail(Code::Internal));
    rig.delete("p").await;
    rig.until_gone("p").await;
    rig.until_unused().await;
    assert_eq!(rig.calls(&driver), ["stage", "publish p", "unpublish p", "unpublish p", "unstage"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_during_any_call_is_taken_back_when_the_pod_is_gone() {
    for (during, want) in
        [("stage", &["stage", "unstage"][..]), ("publish", &["stage", "publish p", "unpublish p", "unstage"])]
    {
        let (mut rig, driver) = Rig::scripted().await;
        driver.next(during, Answer::Hang);
        pod_with_volume(&mut rig).await;
        driver.until_called(during).await;
        rig.crash().await;
        rig.api.remove("pods", "default", "p").await;
        rig.start();
        rig.until_unused().await;
        assert_eq!(rig.calls(&driver), want, "crash during {during}");
        // The directory of a pod that is gone holds nobody up, so it may go last.
        let dir = rig.pod_dir("p");
        eventually(|| !dir.exists()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_during_any_call_is_completed_when_the_pod_is_still_there() {
    for during in ["stage", "publish"] {
        let (mut rig, driver) = Rig::scripted().await;
        driver.next(during, Answer::Hang);
        pod_with_volume(&mut rig).await;
        driver.until_called(during).await;
        rig.crash().await;
        rig.start();
        rig.until_mounted("p").await;
        let calls = rig.calls(&driver);
        assert!(calls.iter().all(|c| !c.starts_with("un")), "{during}: {calls:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_on_the_way_back_is_completed() {
    for during in ["unpublish", "unstage"] {
        let (mut rig, driver) = Rig::scripted().await;
        pod_with_volume(&mut rig).await;
        rig.until_mounted("p").await;
        driver.next(during, Answer::Hang);
        rig.delete("p").await;
        driver.until_called(during).await;
        rig.crash().await;
        if during == "unpublish" {
            assert!(rig.api.get("pods", "default", "p").await.is_some(), "the object outlives the mount");
        }
        rig.start();
        rig.until_gone("p").await;
        rig.until_unused().await;
        assert_eq!(rig.calls(&driver).last().map(String::as_str), Some("unstage"), "crash during {during}");
    }
}
