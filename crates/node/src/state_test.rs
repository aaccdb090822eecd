//! What the state must not forget.

use super::*;
use crate::decide::Attachment;
use crate::desired::{Blocked, PodVolume};

const NODE: &str = "n1";

fn id(handle: &str) -> VolumeId {
    VolumeId::new("d", handle)
}

fn wanted(handle: &str) -> Arc<Wanted> {
    Arc::new(Wanted {
        id: id(handle),
        spec_name: format!("pv-{handle}"),
        read_only: false,
        fs_type: String::new(),
        mount_options: Vec::new(),
        access_modes: vec!["ReadWriteOnce".into()],
        attributes: BTreeMap::new(),
        stage_secret: None,
        publish_secret: None,
        pod_info: false,
    })
}

fn pod(uid: &str, stage: Stage, want: Result<Arc<Wanted>, Blocked>) -> PodWants {
    PodWants {
        key: Key::namespaced("ns", uid),
        uid: uid.into(),
        service_account: String::new(),
        created: None,
        stage,
        volumes: vec![PodVolume { name: "data".into(), want }],
    }
}

fn running(uid: &str) -> PodWants {
    pod(uid, Stage::Running, Ok(wanted("h")))
}

fn plan(state: &mut State) -> Option<Order> {
    let attach = Attach::Required { reported: true, listed: true, attachment: Attachment::Attached };
    state.plan(&id("h"), attach, Driver::Registered { stages: true }, &Failed::default()).0
}

/// Staged and published for pod `a`.
fn mounted() -> State {
    let mut state = State::default();
    state.set_pod(running("a"), NODE);
    state.set_staged(&id("h"), Effect::done());
    state.set_published(&id("h"), "a", "pv-h", Effect::done());
    state
}

#[test]
fn a_begun_publish_is_seen_by_whoever_would_let_the_pod_go() {
    let mut state = State::default();
    assert_eq!(state.set_pod(running("a"), NODE), [id("h")]);
    assert!(matches!(plan(&mut state), Some(Order::Stage { .. })));
    state.set_staged(&id("h"), Effect::done());
    assert!(!state.has_volumes("a"));
    assert!(matches!(plan(&mut state), Some(Order::Publish { .. })));
    assert!(state.has_volumes("a"), "before the call returns");
    state.set_pod(pod("a", Stage::Ended, Ok(wanted("h"))), NODE);
    assert!(matches!(plan(&mut state), Some(Order::Unpublish { .. })));
}

#[test]
fn a_pod_that_ended_gets_nothing_new() {
    let mut state = State::default();
    state.set_pod(running("a"), NODE);
    state.set_pod(pod("a", Stage::Ended, Ok(wanted("h"))), NODE);
    assert!(matches!(plan(&mut state), Some(Order::Forget)));
    assert!(state.all_volumes().is_empty());
}

#[test]
fn a_claim_that_vanishes_does_not_take_the_mount_with_it() {
    let mut state = mounted();
    let blocked = || Err(Blocked::ClaimMissing(Key::namespaced("ns", "c")));
    assert!(state.set_pod(pod("a", Stage::Running, blocked()), NODE).is_empty(), "nothing changed");
    assert!(plan(&mut state).is_none());
    assert_eq!(state.standings("a")[0].1, Standing::Mounted);

    // The same after a restart, when what it wanted before is not known.
    let mut state = State::default();
    let mut actual = Actual::default();
    actual.set_published("a", "pv-h", Effect::found());
    state.adopt(BTreeMap::from([(id("h"), actual)]), NODE);
    state.set_pod(pod("a", Stage::Running, blocked()), NODE);
    assert!(plan(&mut state).is_none());
}

#[test]
fn a_found_mount_waits_until_its_pod_is_known() {
    let mut state = State::default();
    let mut actual = Actual { staged: Effect::found(), ..Actual::default() };
    actual.set_published("a", "pv-h", Effect::found());
    state.adopt(BTreeMap::from([(id("h"), actual)]), NODE);
    assert_eq!(state.begin_report(), [id("h")], "in use from the first report on");
    assert!(plan(&mut state).is_none(), "nobody was asked yet");
    assert_eq!(state.pod_is_gone("a"), [id("h")]);
    assert!(matches!(plan(&mut state), Some(Order::Unpublish { .. })));
    state.set_published(&id("h"), "a", "pv-h", Effect::default());
    assert!(matches!(plan(&mut state), Some(Order::Unstage)));
    state.set_staged(&id("h"), Effect::default());
    assert!(matches!(plan(&mut state), Some(Order::Forget)));
}

#[test]
fn a_volume_that_comes_back_needs_a_new_acknowledgement() {
    let mut state = State::default();
    state.set_pod(running("a"), NODE);
    state.begin_report();
    let acknowledged = BTreeSet::from([id("h").unique_name()]);
    assert_eq!(state.end_report(&acknowledged), [id("h")]);
    assert!(state.end_report(&acknowledged).is_empty(), "woken once");
    assert!(state.is_reported(&id("h")));

    state.pod_is_gone("a");
    assert!(matches!(plan(&mut state), Some(Order::Forget)));
    state.set_pod(running("b"), NODE);
    assert!(!state.is_reported(&id("h")));

    // A report that was under way and still had it counts: the server lists it.
    state.end_report(&acknowledged);
    assert!(state.is_reported(&id("h")));
    state.pod_is_gone("b");
    plan(&mut state);
    state.begin_report();
    assert!(!state.is_reported(&id("h")), "left out of the report that is about to be sent");
}

#[test]
fn a_node_that_was_deleted_has_acknowledged_nothing() {
    let mut state = State::default();
    state.set_pod(running("a"), NODE);
    let acknowledged = BTreeSet::from([id("h").unique_name()]);
    state.end_report(&acknowledged);
    state.forget_reports();
    assert!(!state.is_reported(&id("h")));
    assert_eq!(state.end_report(&acknowledged), [id("h")], "the new acknowledgement wakes it");
}

#[test]
fn an_error_is_told_until_something_else_is_the_matter() {
    let mut state = State::default();
    state.set_pod(running("a"), NODE);
    state.set_error(&id("h"), "a", Some("disk on fire".into()));
    assert_eq!(state.standings("a")[0].1, Standing::Failed("disk on fire".into()));
    let attach = Attach::Required { reported: true, listed: false, attachment: Attachment::Missing };
    let (_, changed) = state.plan(&id("h"), attach, Driver::NotRegistered, &Failed::default());
    assert_eq!(changed, ["a"]);
    assert_eq!(state.standings("a")[0].1, Standing::Waiting(Wait::NotAttached(Attachment::Missing)));
}
