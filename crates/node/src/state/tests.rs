//! Sequences of changes to the state, and the operations that follow from them.

use super::*;
use crate::decide::AttachmentState;
use crate::desired::{PodVolume, ResolveError};

const NODE: &str = "n1";

fn id(handle: &str) -> VolumeId {
    VolumeId::new("d", handle)
}

fn spec(handle: &str) -> Arc<VolumeSpec> {
    Arc::new(VolumeSpec {
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

fn pod(uid: &str, lifecycle: PodLifecycle, spec: Result<Arc<VolumeSpec>, ResolveError>) -> DesiredPod {
    DesiredPod {
        key: Key::namespaced("ns", uid),
        uid: uid.into(),
        service_account: String::new(),
        created: None,
        lifecycle,
        volumes: vec![PodVolume { name: "data".into(), spec }],
    }
}

fn running(uid: &str) -> DesiredPod {
    pod(uid, PodLifecycle::Running, Ok(spec("h")))
}

fn plan(state: &mut NodeState) -> Option<Operation> {
    let attach = AttachState::Required {
        in_use_reported: true,
        listed_as_attached: true,
        attachment: AttachmentState::Attached,
    };
    state.plan(&id("h"), attach, DriverState::Registered { stages: true }, &FailedSteps::default()).0
}

/// Staged and published for pod `a`.
fn mounted() -> NodeState {
    let mut state = NodeState::default();
    state.update_pod(running("a"), NODE);
    state.set_staged(&id("h"), MountState::mounted());
    state.set_published(&id("h"), "a", "pv-h", MountState::mounted());
    state
}

#[test]
fn a_started_publish_counts_as_a_volume_of_the_pod() {
    let mut state = NodeState::default();
    assert_eq!(state.update_pod(running("a"), NODE), [id("h")]);
    assert!(matches!(plan(&mut state), Some(Operation::Stage { .. })));
    state.set_staged(&id("h"), MountState::mounted());
    assert!(!state.has_volumes("a"));
    assert!(matches!(plan(&mut state), Some(Operation::Publish { .. })));
    assert!(state.has_volumes("a"), "before the call returns");
    state.update_pod(pod("a", PodLifecycle::Terminated, Ok(spec("h"))), NODE);
    assert!(matches!(plan(&mut state), Some(Operation::Unpublish { .. })));
}

#[test]
fn a_terminated_pod_gets_no_new_mount() {
    let mut state = NodeState::default();
    state.update_pod(running("a"), NODE);
    state.update_pod(pod("a", PodLifecycle::Terminated, Ok(spec("h"))), NODE);
    assert!(matches!(plan(&mut state), Some(Operation::Forget)));
    assert!(state.all_volumes().is_empty());
}

#[test]
fn a_deleted_claim_does_not_unmount_the_volume() {
    let mut state = mounted();
    let unresolved = || Err(ResolveError::ClaimMissing(Key::namespaced("ns", "c")));
    assert!(state.update_pod(pod("a", PodLifecycle::Running, unresolved()), NODE).is_empty(), "nothing changed");
    assert!(plan(&mut state).is_none());
    assert_eq!(state.volume_statuses("a")[0].1, VolumeStatus::Mounted);

    // The same after a restart, when the earlier spec is not known.
    let mut state = NodeState::default();
    let mut actual = ActualVolume::default();
    actual.set_published("a", "pv-h", MountState::reconstructed());
    state.load_reconstructed(BTreeMap::from([(id("h"), actual)]), NODE);
    state.update_pod(pod("a", PodLifecycle::Running, unresolved()), NODE);
    assert!(plan(&mut state).is_none());
}

#[test]
fn a_reconstructed_mount_stays_until_its_pod_is_confirmed_gone() {
    let mut state = NodeState::default();
    let mut actual = ActualVolume { staged: MountState::reconstructed(), ..ActualVolume::default() };
    actual.set_published("a", "pv-h", MountState::reconstructed());
    state.load_reconstructed(BTreeMap::from([(id("h"), actual)]), NODE);
    assert_eq!(state.begin_report(), [id("h")], "in use from the first report on");
    assert!(plan(&mut state).is_none(), "the server was not asked yet");
    assert_eq!(state.confirm_pod_gone("a"), [id("h")]);
    assert!(matches!(plan(&mut state), Some(Operation::Unpublish { .. })));
    state.set_published(&id("h"), "a", "pv-h", MountState::default());
    assert!(matches!(plan(&mut state), Some(Operation::Unstage)));
    state.set_staged(&id("h"), MountState::default());
    assert!(matches!(plan(&mut state), Some(Operation::Forget)));
}

#[test]
fn a_volume_that_is_needed_again_requires_a_new_acknowledgement() {
    let mut state = NodeState::default();
    state.update_pod(running("a"), NODE);
    state.begin_report();
    let acknowledged = BTreeSet::from([id("h").unique_name()]);
    assert_eq!(state.end_report(&acknowledged), [id("h")]);
    assert!(state.end_report(&acknowledged).is_empty(), "woken once");
    assert!(state.is_reported(&id("h")));

    state.confirm_pod_gone("a");
    assert!(matches!(plan(&mut state), Some(Operation::Forget)));
    state.update_pod(running("b"), NODE);
    assert!(!state.is_reported(&id("h")));

    // The acknowledgement of an earlier write that still contained the volume counts: the server lists it.
    state.end_report(&acknowledged);
    assert!(state.is_reported(&id("h")));
    state.confirm_pod_gone("b");
    plan(&mut state);
    state.begin_report();
    assert!(!state.is_reported(&id("h")), "left out of the report that is about to be sent");
}

#[test]
fn a_deleted_node_withdraws_its_acknowledgements() {
    let mut state = NodeState::default();
    state.update_pod(running("a"), NODE);
    let acknowledged = BTreeSet::from([id("h").unique_name()]);
    state.end_report(&acknowledged);
    state.clear_reported();
    assert!(!state.is_reported(&id("h")));
    assert_eq!(state.end_report(&acknowledged), [id("h")], "the new acknowledgement wakes it");
}

#[test]
fn an_error_is_reported_until_the_pod_waits_for_another_reason() {
    let mut state = NodeState::default();
    state.update_pod(running("a"), NODE);
    state.set_error(&id("h"), "a", Some("disk on fire".into()));
    assert_eq!(state.volume_statuses("a")[0].1, VolumeStatus::Failed("disk on fire".into()));
    let attach = AttachState::Required {
        in_use_reported: true,
        listed_as_attached: false,
        attachment: AttachmentState::Missing,
    };
    let (_, changed) = state.plan(&id("h"), attach, DriverState::NotRegistered, &FailedSteps::default());
    assert_eq!(changed, ["a"]);
    assert_eq!(
        state.volume_statuses("a")[0].1,
        VolumeStatus::Waiting(WaitReason::NotAttached(AttachmentState::Missing))
    );
}
