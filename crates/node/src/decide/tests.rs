//! The cases of [`super::decide`].

use super::*;
use PodNeed::*;
use Presence::*;

fn pod(uid: &str, need: PodNeed, published: Presence) -> ObservedPod {
    ObservedPod { uid: uid.into(), need, published, exclusive: false, failed: false }
}

fn attached() -> AttachState {
    AttachState::Required { in_use_reported: true, listed_as_attached: true, attachment: AttachmentState::Attached }
}

/// Attached, driver present, not staged.
fn attached_volume(pods: Vec<ObservedPod>) -> ObservedVolume {
    ObservedVolume {
        pods,
        staged: Absent,
        stage_failed: false,
        attach: attached(),
        driver: DriverState::Registered { stages: true },
    }
}

fn staged_volume(pods: Vec<ObservedPod>) -> ObservedVolume {
    ObservedVolume { staged: Present, ..attached_volume(pods) }
}

fn stage(uid: &str) -> Option<Step> {
    Some(Step::Stage(uid.into()))
}

fn publish(uid: &str) -> Option<Step> {
    Some(Step::Publish(uid.into()))
}

fn unpublish(uid: &str) -> Option<Step> {
    Some(Step::Unpublish(uid.into()))
}

#[test]
fn one_step_follows_from_the_observed_volume() {
    let exclusive = |p: ObservedPod| ObservedPod { exclusive: true, ..p };
    let failed = |p: ObservedPod| ObservedPod { failed: true, ..p };
    let no_stage = DriverState::Registered { stages: false };
    for (case, volume, want) in [
        ("a first pod: stage before publish", attached_volume(vec![pod("a", Mount, Absent)]), stage("a")),
        ("staged: publish", staged_volume(vec![pod("a", Mount, Absent)]), publish("a")),
        (
            "no answer to stage: repeat it before publish",
            ObservedVolume { staged: Uncertain, ..attached_volume(vec![pod("a", Mount, Absent)]) },
            stage("a"),
        ),
        ("no answer to publish: repeat it", staged_volume(vec![pod("a", Mount, Uncertain)]), publish("a")),
        (
            "a driver without staging",
            ObservedVolume { driver: no_stage, ..attached_volume(vec![pod("a", Mount, Absent)]) },
            publish("a"),
        ),
        (
            "a driver without attachment",
            ObservedVolume { attach: AttachState::NotRequired, ..attached_volume(vec![pod("a", Mount, Absent)]) },
            stage("a"),
        ),
        ("mounted as needed: nothing", staged_volume(vec![pod("a", Mount, Present)]), None),
        (
            "a second pod shares the stage",
            staged_volume(vec![pod("a", Mount, Present), pod("b", Mount, Absent)]),
            publish("b"),
        ),
        (
            "the released pod goes first",
            staged_volume(vec![pod("a", Mount, Absent), pod("b", Release, Present)]),
            unpublish("b"),
        ),
        ("an uncertain mount is unmounted too", staged_volume(vec![pod("b", Release, Uncertain)]), unpublish("b")),
        (
            "still used by the other: the stage stays",
            staged_volume(vec![pod("a", Mount, Present), pod("b", Release, Absent)]),
            None,
        ),
        ("no pod left: unstage", staged_volume(vec![pod("b", Release, Absent)]), Some(Step::Unstage)),
        (
            "no pod left, stage uncertain: unstage",
            ObservedVolume { staged: Uncertain, ..attached_volume(vec![]) },
            Some(Step::Unstage),
        ),
        ("nothing mounted: forget", attached_volume(vec![]), Some(Step::Forget)),
        ("a pod that is not confirmed gone keeps its mount", staged_volume(vec![pod("a", Unconfirmed, Present)]), None),
        ("a terminating pod keeps its mount", staged_volume(vec![pod("a", Keep, Present)]), None),
        ("a terminating pod gets no new mount, and the stage stays", staged_volume(vec![pod("a", Keep, Absent)]), None),
        (
            "one pod only: the second waits",
            staged_volume(vec![exclusive(pod("a", Mount, Present)), exclusive(pod("b", Mount, Absent))]),
            None,
        ),
        (
            "one pod only: an uncertain mount counts as use",
            staged_volume(vec![exclusive(pod("b", Mount, Absent)), exclusive(pod("a", Release, Uncertain))]),
            unpublish("a"),
        ),
        (
            "the failure of one pod does not delay the next",
            staged_volume(vec![failed(pod("a", Mount, Absent)), pod("b", Mount, Absent)]),
            publish("b"),
        ),
        (
            "a failed unpublish does not delay the next",
            staged_volume(vec![failed(pod("a", Release, Present)), pod("b", Release, Present)]),
            unpublish("b"),
        ),
        ("a failed unpublish forbids unstage", staged_volume(vec![failed(pod("a", Release, Uncertain))]), None),
        (
            "a failed unstage is not repeated in the same reconcile",
            ObservedVolume { stage_failed: true, ..staged_volume(vec![]) },
            None,
        ),
        (
            "without the driver nothing can be unstaged",
            ObservedVolume { driver: DriverState::NotRegistered, ..staged_volume(vec![]) },
            None,
        ),
        (
            "without the driver nothing staged can still be forgotten",
            ObservedVolume { driver: DriverState::NotRegistered, ..attached_volume(vec![]) },
            Some(Step::Forget),
        ),
        (
            "unpublish needs no attachment",
            ObservedVolume {
                attach: AttachState::Required {
                    in_use_reported: false,
                    listed_as_attached: false,
                    attachment: AttachmentState::Missing,
                },
                ..staged_volume(vec![pod("a", Release, Present)])
            },
            unpublish("a"),
        ),
    ] {
        assert_eq!(decide(&volume).next, want, "{case}");
    }
}

#[test]
fn a_waiting_pod_gets_the_reason() {
    let required = |in_use_reported, listed_as_attached, attachment| AttachState::Required {
        in_use_reported,
        listed_as_attached,
        attachment,
    };
    let needs_mount = || attached_volume(vec![pod("a", Mount, Absent)]);
    for (case, volume, want) in [
        (
            "in use must be acknowledged first, also if it is attached",
            ObservedVolume { attach: required(false, true, AttachmentState::Attached), ..needs_mount() },
            WaitReason::InUseNotReported,
        ),
        (
            "no attachment yet",
            ObservedVolume { attach: required(true, false, AttachmentState::Missing), ..needs_mount() },
            WaitReason::NotAttached(AttachmentState::Missing),
        ),
        (
            "attached, but the node does not list it yet",
            ObservedVolume { attach: required(true, false, AttachmentState::Attached), ..needs_mount() },
            WaitReason::NotAttached(AttachmentState::Pending),
        ),
        (
            "listed, but the attachment is being deleted",
            ObservedVolume { attach: required(true, true, AttachmentState::Deleting), ..needs_mount() },
            WaitReason::NotAttached(AttachmentState::Deleting),
        ),
        (
            "the attach error is passed on",
            ObservedVolume { attach: required(true, false, AttachmentState::Failed("full".into())), ..needs_mount() },
            WaitReason::NotAttached(AttachmentState::Failed("full".into())),
        ),
        (
            "no driver",
            ObservedVolume { driver: DriverState::NotRegistered, ..needs_mount() },
            WaitReason::DriverNotRegistered,
        ),
        (
            "no driver to unpublish with",
            ObservedVolume { driver: DriverState::NotRegistered, ..staged_volume(vec![pod("a", Release, Present)]) },
            WaitReason::DriverNotRegistered,
        ),
        ("the stage failed", ObservedVolume { stage_failed: true, ..needs_mount() }, WaitReason::LastAttemptFailed),
        (
            "another pod has the exclusive volume",
            staged_volume(vec![ObservedPod { exclusive: true, ..pod("a", Mount, Absent) }, pod("b", Keep, Present)]),
            WaitReason::UsedByAnotherPod,
        ),
    ] {
        let plan = decide(&volume);
        assert_eq!((plan.next, plan.waiting.get("a")), (None, Some(&want)), "{case}");
    }
    let two = decide(&staged_volume(vec![pod("b", Mount, Absent), pod("a", Mount, Absent)]));
    assert_eq!(
        (two.next, two.waiting.get("a")),
        (publish("b"), Some(&WaitReason::AnotherPodFirst)),
        "one step at a time"
    );
}
