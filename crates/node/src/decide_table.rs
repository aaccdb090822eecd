//! The cases of [`super::decide`].

use super::*;
use Desire::*;
use Presence::*;

fn pod(uid: &str, desire: Desire, published: Presence) -> PodView {
    PodView { uid: uid.into(), desire, published, exclusive: false, failed: false }
}

fn attached() -> Attach {
    Attach::Required { reported: true, listed: true, attachment: Attachment::Attached }
}

/// Attached, driver present, not staged.
fn seen(pods: Vec<PodView>) -> Seen {
    Seen { pods, staged: Absent, stage_failed: false, attach: attached(), driver: Driver::Registered { stages: true } }
}

fn staged(pods: Vec<PodView>) -> Seen {
    Seen { staged: Present, ..seen(pods) }
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
fn the_next_step() {
    let exclusive = |p: PodView| PodView { exclusive: true, ..p };
    let failed = |p: PodView| PodView { failed: true, ..p };
    let no_stage = Driver::Registered { stages: false };
    for (case, seen, want) in [
        ("a first pod: stage before publish", seen(vec![pod("a", Mount, Absent)]), stage("a")),
        ("staged: publish", staged(vec![pod("a", Mount, Absent)]), publish("a")),
        (
            "no answer to stage: repeat it, do not build upon it",
            Seen { staged: Uncertain, ..seen(vec![pod("a", Mount, Absent)]) },
            stage("a"),
        ),
        ("no answer to publish: repeat it", staged(vec![pod("a", Mount, Uncertain)]), publish("a")),
        ("a driver without staging", Seen { driver: no_stage, ..seen(vec![pod("a", Mount, Absent)]) }, publish("a")),
        (
            "a driver without attachment",
            Seen { attach: Attach::NotRequired, ..seen(vec![pod("a", Mount, Absent)]) },
            stage("a"),
        ),
        ("mounted as wanted: nothing", staged(vec![pod("a", Mount, Present)]), None),
        (
            "a second pod shares the stage",
            staged(vec![pod("a", Mount, Present), pod("b", Mount, Absent)]),
            publish("b"),
        ),
        (
            "the released pod goes first",
            staged(vec![pod("a", Mount, Absent), pod("b", Release, Present)]),
            unpublish("b"),
        ),
        ("what may be mounted is unmounted too", staged(vec![pod("b", Release, Uncertain)]), unpublish("b")),
        (
            "still used by the other: the stage stays",
            staged(vec![pod("a", Mount, Present), pod("b", Release, Absent)]),
            None,
        ),
        ("nobody left: unstage", staged(vec![pod("b", Release, Absent)]), Some(Step::Unstage)),
        ("nobody left, stage in doubt: unstage", Seen { staged: Uncertain, ..seen(vec![]) }, Some(Step::Unstage)),
        ("nothing left: forget", seen(vec![]), Some(Step::Forget)),
        ("a pod nobody confirmed gone keeps its mount", staged(vec![pod("a", Unconfirmed, Present)]), None),
        ("a stopping pod keeps its mount", staged(vec![pod("a", Keep, Present)]), None),
        ("a stopping pod gets nothing new, and the stage waits for it", staged(vec![pod("a", Keep, Absent)]), None),
        (
            "one pod only: the second waits",
            staged(vec![exclusive(pod("a", Mount, Present)), exclusive(pod("b", Mount, Absent))]),
            None,
        ),
        (
            "one pod only: a mount in doubt counts as use",
            staged(vec![exclusive(pod("b", Mount, Absent)), exclusive(pod("a", Release, Uncertain))]),
            unpublish("a"),
        ),
        (
            "one pod's failure does not hold up the next",
            staged(vec![failed(pod("a", Mount, Absent)), pod("b", Mount, Absent)]),
            publish("b"),
        ),
        (
            "a failed unpublish does not hold up the next",
            staged(vec![failed(pod("a", Release, Present)), pod("b", Release, Present)]),
            unpublish("b"),
        ),
        ("a failed unpublish forbids unstage", staged(vec![failed(pod("a", Release, Uncertain))]), None),
        ("a failed unstage is not repeated at once", Seen { stage_failed: true, ..staged(vec![]) }, None),
        ("without the driver nothing can be unstaged", Seen { driver: Driver::NotRegistered, ..staged(vec![]) }, None),
        (
            "without the driver nothing staged can still be forgotten",
            Seen { driver: Driver::NotRegistered, ..seen(vec![]) },
            Some(Step::Forget),
        ),
        (
            "no attachment any more: release needs none",
            Seen {
                attach: Attach::Required { reported: false, listed: false, attachment: Attachment::Missing },
                ..staged(vec![pod("a", Release, Present)])
            },
            unpublish("a"),
        ),
    ] {
        assert_eq!(decide(&seen).next, want, "{case}");
    }
}

#[test]
fn the_reason_to_wait() {
    let required = |reported, listed, attachment| Attach::Required { reported, listed, attachment };
    let wants = || seen(vec![pod("a", Mount, Absent)]);
    for (case, seen, want) in [
        (
            "in use must be known to the server first, whatever is attached",
            Seen { attach: required(false, true, Attachment::Attached), ..wants() },
            Wait::InUseNotReported,
        ),
        (
            "no attachment yet",
            Seen { attach: required(true, false, Attachment::Missing), ..wants() },
            Wait::NotAttached(Attachment::Missing),
        ),
        (
            "attached, but the node does not list it yet",
            Seen { attach: required(true, false, Attachment::Attached), ..wants() },
            Wait::NotAttached(Attachment::Pending),
        ),
        (
            "listed, but the attachment is going",
            Seen { attach: required(true, true, Attachment::Deleting), ..wants() },
            Wait::NotAttached(Attachment::Deleting),
        ),
        (
            "the attach error is passed on",
            Seen { attach: required(true, false, Attachment::Failed("full".into())), ..wants() },
            Wait::NotAttached(Attachment::Failed("full".into())),
        ),
        ("no driver", Seen { driver: Driver::NotRegistered, ..wants() }, Wait::DriverNotRegistered),
        (
            "no driver to unpublish with",
            Seen { driver: Driver::NotRegistered, ..staged(vec![pod("a", Release, Present)]) },
            Wait::DriverNotRegistered,
        ),
        ("the stage failed", Seen { stage_failed: true, ..wants() }, Wait::Retry),
        (
            "another pod has it to itself",
            staged(vec![PodView { exclusive: true, ..pod("a", Mount, Absent) }, pod("b", Keep, Present)]),
            Wait::UsedByAnotherPod,
        ),
    ] {
        let plan = decide(&seen);
        assert_eq!((plan.next, plan.waiting.get("a")), (None, Some(&want)), "{case}");
    }
    let two = decide(&staged(vec![pod("b", Mount, Absent), pod("a", Mount, Absent)]));
    assert_eq!((two.next, two.waiting.get("a")), (publish("b"), Some(&Wait::Turn)), "one step at a time");
}
