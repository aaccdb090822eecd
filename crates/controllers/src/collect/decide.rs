//! Decides whether an object without owners is deleted, and how a namespace is emptied. Pure: the caller has read the
//! owners.

use std::collections::BTreeMap;

/// On an object that is being deleted: its dependents lose their owner reference first.
pub const ORPHAN_FINALIZER: &str = "orphan";
/// On an object that is being deleted: its blocking dependents are deleted first.
pub const FOREGROUND_FINALIZER: &str = "foregroundDeletion";
/// In `spec.finalizers` of a namespace: its content is deleted first.
pub const NAMESPACE_FINALIZER: &str = "kubernetes";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerState {
    /// Exists, and does not wait for its dependents.
    Exists,
    /// Does not exist, or is in another namespace and so cannot be an owner.
    Absent,
    /// Is being deleted in the foreground, and waits until its dependents are deleted.
    WaitingForDependents,
}

/// An object, the state of its owners and the number of its dependents.
#[derive(Clone, Debug, Default)]
pub struct ObjectSnapshot {
    pub deleting: bool,
    pub finalizers: Vec<String>,
    /// The state of each owner, with its uid.
    pub owners: Vec<(String, OwnerState)>,
    pub dependents: usize,
    /// Dependents with `blockOwnerDeletion`.
    pub blocking_dependents: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    Background,
    Foreground,
    Orphan,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectDecision {
    Keep,
    /// Its deletion waits for this reason.
    Wait(&'static str),
    /// Remove the references to these owners, by uid. The object keeps its other owners.
    RemoveOwners(Vec<String>),
    Delete(Propagation),
    /// Remove the owner reference from its dependents, then its own finalizer.
    OrphanDependents,
    RemoveFinalizer(&'static str),
}

pub fn object(snapshot: &ObjectSnapshot) -> ObjectDecision {
    let has = |finalizer: &str| snapshot.finalizers.iter().any(|f| f == finalizer);
    if snapshot.deleting {
        return match (has(ORPHAN_FINALIZER), has(FOREGROUND_FINALIZER)) {
            (true, _) => ObjectDecision::OrphanDependents,
            (false, true) if snapshot.blocking_dependents > 0 => {
                ObjectDecision::Wait("dependents that block its deletion")
            }
            (false, true) => ObjectDecision::RemoveFinalizer(FOREGROUND_FINALIZER),
            (false, false) => ObjectDecision::Keep,
        };
    }
    let is_any = |state: OwnerState| snapshot.owners.iter().any(|(_, owner)| *owner == state);
    if snapshot.owners.iter().all(|(_, owner)| *owner == OwnerState::Exists) {
        return ObjectDecision::Keep;
    }
    if is_any(OwnerState::Exists) {
        let gone = snapshot.owners.iter().filter(|(_, owner)| *owner != OwnerState::Exists).map(|(uid, _)| uid.clone());
        return ObjectDecision::RemoveOwners(gone.collect());
    }
    // An owner in foreground deletion waits for indirect dependents too.
    if is_any(OwnerState::WaitingForDependents) && snapshot.dependents > 0 {
        return ObjectDecision::Delete(Propagation::Foreground);
    }
    ObjectDecision::Delete(match (has(ORPHAN_FINALIZER), has(FOREGROUND_FINALIZER)) {
        (true, _) => Propagation::Orphan,
        (false, true) => Propagation::Foreground,
        (false, false) => Propagation::Background,
    })
}

/// An object in a namespace that is being deleted.
#[derive(Clone, Debug)]
pub struct NamespacedObject {
    /// The plural and the group of the kind: `pods.` or `things.example.com`.
    pub kind: String,
    pub deleting: bool,
    pub finalizers: Vec<String>,
}

#[derive(Clone, Debug, Default)]
pub struct NamespaceSnapshot {
    pub deleting: bool,
    /// `spec.finalizers`.
    pub finalizers: Vec<String>,
    /// The objects in the namespace; empty if the namespace is not being deleted.
    pub content: Vec<NamespacedObject>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamespaceDecision {
    Keep,
    /// Delete all objects of these kinds. Pods are deleted first: they may need the other objects to terminate.
    DeleteContent(Vec<String>),
    /// Everything left is being deleted: report what the namespace waits for.
    ReportRemaining(Vec<NamespaceCondition>),
    Finalize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceCondition {
    pub type_: &'static str,
    pub is_true: bool,
    pub reason: &'static str,
    pub message: String,
}

pub fn namespace(snapshot: &NamespaceSnapshot) -> NamespaceDecision {
    if !snapshot.deleting || !snapshot.finalizers.iter().any(|f| f == NAMESPACE_FINALIZER) {
        return NamespaceDecision::Keep;
    }
    if snapshot.content.is_empty() {
        return NamespaceDecision::Finalize;
    }
    let mut undeleted: Vec<String> = snapshot.content.iter().filter(|c| !c.deleting).map(|c| c.kind.clone()).collect();
    undeleted.sort();
    undeleted.dedup();
    if undeleted.is_empty() {
        return NamespaceDecision::ReportRemaining(conditions(&snapshot.content));
    }
    match undeleted.iter().position(|kind| kind == "pods.") {
        Some(pods) => NamespaceDecision::DeleteContent(vec![undeleted.swap_remove(pods)]),
        None => NamespaceDecision::DeleteContent(undeleted),
    }
}

fn conditions(content: &[NamespacedObject]) -> Vec<NamespaceCondition> {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    let mut finalizers: BTreeMap<&str, usize> = BTreeMap::new();
    for object in content {
        *kinds.entry(&object.kind).or_default() += 1;
        for finalizer in &object.finalizers {
            *finalizers.entry(finalizer).or_default() += 1;
        }
    }
    let describe = |counts: &BTreeMap<&str, usize>, word: &str| {
        counts.iter().map(|(what, n)| format!("{what} {word} {n} resource instances")).collect::<Vec<_>>().join(", ")
    };
    let ok =
        |type_, reason, message: &str| NamespaceCondition { type_, is_true: false, reason, message: message.into() };
    let mut found = vec![
        ok("NamespaceDeletionDiscoveryFailure", "ResourcesDiscovered", "All resources successfully discovered"),
        ok(
            "NamespaceDeletionGroupVersionParsingFailure",
            "ParsedGroupVersions",
            "All legacy kube types successfully parsed",
        ),
        ok(
            "NamespaceDeletionContentFailure",
            "ContentDeleted",
            "All content successfully deleted, may be waiting on finalization",
        ),
        NamespaceCondition {
            type_: "NamespaceContentRemaining",
            is_true: true,
            reason: "SomeResourcesRemain",
            message: format!("Some resources are remaining: {}", describe(&kinds, "has")),
        },
    ];
    found.push(match finalizers.is_empty() {
        true => {
            ok("NamespaceFinalizersRemaining", "ContentHasNoFinalizers", "All content-preserving finalizers finished")
        }
        false => NamespaceCondition {
            type_: "NamespaceFinalizersRemaining",
            is_true: true,
            reason: "SomeFinalizersRemain",
            message: format!("Some content in the namespace has finalizers remaining: {}", describe(&finalizers, "in")),
        },
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_without_owners_are_deleted_and_no_others() {
        use OwnerState::{Absent, Exists, WaitingForDependents as Waiting};
        let owners =
            |list: &[OwnerState]| list.iter().enumerate().map(|(i, o)| (i.to_string(), *o)).collect::<Vec<_>>();
        let existing = |list: &[OwnerState], dependents| ObjectSnapshot {
            owners: owners(list),
            dependents,
            ..ObjectSnapshot::default()
        };
        let deleting = |finalizer: &str, blocking_dependents| ObjectSnapshot {
            deleting: true,
            finalizers: vec![finalizer.into(), "other/one".into()],
            dependents: 2,
            blocking_dependents,
            ..ObjectSnapshot::default()
        };
        let marked = |finalizer: &str| ObjectSnapshot { finalizers: vec![finalizer.into()], ..existing(&[Absent], 0) };
        for (case, snapshot, want) in [
            ("no owner at all", existing(&[], 0), ObjectDecision::Keep),
            ("its owner exists", existing(&[Exists], 3), ObjectDecision::Keep),
            ("its only owner is absent", existing(&[Absent], 0), ObjectDecision::Delete(Propagation::Background)),
            ("all owners are absent", existing(&[Absent, Absent], 1), ObjectDecision::Delete(Propagation::Background)),
            ("one owner is absent", existing(&[Exists, Absent], 0), ObjectDecision::RemoveOwners(vec!["1".into()])),
            (
                "one owner waits for its dependents",
                existing(&[Waiting, Exists], 0),
                ObjectDecision::RemoveOwners(vec!["0".into()]),
            ),
            ("its only owner waits for it", existing(&[Waiting], 0), ObjectDecision::Delete(Propagation::Background)),
            (
                "its only owner waits for indirect dependents too",
                existing(&[Waiting], 1),
                ObjectDecision::Delete(Propagation::Foreground),
            ),
            ("it has the finalizer orphan", marked(ORPHAN_FINALIZER), ObjectDecision::Delete(Propagation::Orphan)),
            (
                "it has the finalizer foregroundDeletion",
                marked(FOREGROUND_FINALIZER),
                ObjectDecision::Delete(Propagation::Foreground),
            ),
            ("being deleted with orphaning", deleting(ORPHAN_FINALIZER, 1), ObjectDecision::OrphanDependents),
            (
                "being deleted, blocked by a dependent",
                deleting(FOREGROUND_FINALIZER, 1),
                ObjectDecision::Wait("dependents that block its deletion"),
            ),
            (
                "being deleted, not blocked",
                deleting(FOREGROUND_FINALIZER, 0),
                ObjectDecision::RemoveFinalizer(FOREGROUND_FINALIZER),
            ),
            ("being deleted, with a finalizer of another controller", deleting("a/b", 1), ObjectDecision::Keep),
        ] {
            assert_eq!(object(&snapshot), want, "{case}");
        }
    }

    #[test]
    fn a_namespace_is_finalized_after_its_content_is_deleted() {
        let content = |kind: &str, deleting| NamespacedObject {
            kind: kind.into(),
            deleting,
            finalizers: if deleting { vec!["a/b".into()] } else { Vec::new() },
        };
        let snapshot = |content: Vec<NamespacedObject>| NamespaceSnapshot {
            deleting: true,
            finalizers: vec![NAMESPACE_FINALIZER.into()],
            content,
        };
        assert_eq!(namespace(&NamespaceSnapshot::default()), NamespaceDecision::Keep);
        let finalized = NamespaceSnapshot { finalizers: vec!["a/b".into()], ..snapshot(vec![]) };
        assert_eq!(namespace(&finalized), NamespaceDecision::Keep, "without the finalizer");
        assert_eq!(namespace(&snapshot(vec![])), NamespaceDecision::Finalize);
        let pods_first = snapshot(vec![content("configmaps.", false), content("pods.", false)]);
        assert_eq!(namespace(&pods_first), NamespaceDecision::DeleteContent(vec!["pods.".into()]));
        let rest = snapshot(vec![content("configmaps.", false), content("pods.", true), content("configmaps.", false)]);
        assert_eq!(namespace(&rest), NamespaceDecision::DeleteContent(vec!["configmaps.".into()]));
        let NamespaceDecision::ReportRemaining(conditions) = namespace(&snapshot(vec![content("pods.", true)])) else {
            panic!("the remaining objects are not reported")
        };
        let holding: Vec<_> = conditions.iter().filter(|c| c.is_true).collect();
        assert_eq!(holding[0].message, "Some resources are remaining: pods. has 1 resource instances");
        assert_eq!(holding[1].type_, "NamespaceFinalizersRemaining");
    }
}
