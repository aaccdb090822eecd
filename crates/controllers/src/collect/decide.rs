//! May an object go, and must it? What of a namespace? Pure: owners were looked up, live where that matters.

use std::collections::BTreeMap;

pub const ORPHAN: &str = "orphan";
pub const FOREGROUND: &str = "foregroundDeletion";
/// The finalizer of a namespace that stands for its content.
pub const CONTENT: &str = "kubernetes";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// There, and not on its way out.
    Solid,
    /// Proved absent.
    Absent,
    /// Being deleted in the foreground: it waits for its dependents to go.
    Waiting,
}

/// An object and what is around it.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub deleting: bool,
    pub finalizers: Vec<String>,
    /// Each owner by uid.
    pub owners: Vec<(String, Owner)>,
    pub dependents: usize,
    /// Dependents that do not let it go before them.
    pub blocking: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    Background,
    Foreground,
    Orphan,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Keep,
    Await(&'static str),
    /// These owners, by uid, are none any more; others are.
    Disown(Vec<String>),
    Delete(Propagation),
    /// Its dependents forget it, then its finalizer goes.
    Orphan,
    Release(&'static str),
}

pub fn object(seen: &Seen) -> Decision {
    let has = |finalizer: &str| seen.finalizers.iter().any(|f| f == finalizer);
    if seen.deleting {
        return match (has(ORPHAN), has(FOREGROUND)) {
            (true, _) => Decision::Orphan,
            (false, true) if seen.blocking > 0 => Decision::Await("dependents that block its deletion"),
            (false, true) => Decision::Release(FOREGROUND),
            (false, false) => Decision::Keep,
        };
    }
    let is = |wanted: Owner| seen.owners.iter().any(|(_, owner)| *owner == wanted);
    if seen.owners.is_empty() || (is(Owner::Solid) && !is(Owner::Absent) && !is(Owner::Waiting)) {
        return Decision::Keep;
    }
    if is(Owner::Solid) {
        let gone = seen.owners.iter().filter(|(_, owner)| *owner != Owner::Solid).map(|(uid, _)| uid.clone());
        return Decision::Disown(gone.collect());
    }
    // An owner that waits for us wants all of what hangs on us gone, too.
    if is(Owner::Waiting) && seen.dependents > 0 {
        return Decision::Delete(Propagation::Foreground);
    }
    Decision::Delete(match (has(ORPHAN), has(FOREGROUND)) {
        (true, _) => Propagation::Orphan,
        (false, true) => Propagation::Foreground,
        (false, false) => Propagation::Background,
    })
}

/// An object in a namespace that is being deleted.
#[derive(Clone, Debug)]
pub struct Content {
    /// The kind's plural and group, as in `pods.` or `things.example.com`.
    pub kind: String,
    pub deleting: bool,
    pub finalizers: Vec<String>,
}

#[derive(Clone, Debug, Default)]
pub struct SeenNamespace {
    pub deleting: bool,
    pub finalizers: Vec<String>,
    pub content: Vec<Content>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Namespace {
    Keep,
    /// Objects of these kinds are still to be deleted; pods come first, others may be needed by them to end.
    Empty(Vec<String>),
    /// What is left ends by itself.
    Await(Vec<Condition>),
    Finalize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub kind: &'static str,
    pub holds: bool,
    pub reason: &'static str,
    pub message: String,
}

pub fn namespace(seen: &SeenNamespace) -> Namespace {
    if !seen.deleting || !seen.finalizers.iter().any(|f| f == CONTENT) {
        return Namespace::Keep;
    }
    if seen.content.is_empty() {
        return Namespace::Finalize;
    }
    let mut living: Vec<String> = seen.content.iter().filter(|c| !c.deleting).map(|c| c.kind.clone()).collect();
    living.sort();
    living.dedup();
    if living.is_empty() {
        return Namespace::Await(conditions(&seen.content));
    }
    match living.iter().position(|kind| kind == "pods.") {
        Some(pods) => Namespace::Empty(vec![living.swap_remove(pods)]),
        None => Namespace::Empty(living),
    }
}

fn conditions(content: &[Content]) -> Vec<Condition> {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    let mut finalizers: BTreeMap<&str, usize> = BTreeMap::new();
    for object in content {
        *kinds.entry(&object.kind).or_default() += 1;
        for finalizer in &object.finalizers {
            *finalizers.entry(finalizer).or_default() += 1;
        }
    }
    let listed = |counts: &BTreeMap<&str, usize>, word: &str| {
        counts.iter().map(|(what, n)| format!("{what} {word} {n} resource instances")).collect::<Vec<_>>().join(", ")
    };
    let fine = |kind, reason, message: &str| Condition { kind, holds: false, reason, message: message.into() };
    let mut found = vec![
        fine("NamespaceDeletionDiscoveryFailure", "ResourcesDiscovered", "All resources successfully discovered"),
        fine(
            "NamespaceDeletionGroupVersionParsingFailure",
            "ParsedGroupVersions",
            "All legacy kube types successfully parsed",
        ),
        fine(
            "NamespaceDeletionContentFailure",
            "ContentDeleted",
            "All content successfully deleted, may be waiting on finalization",
        ),
        Condition {
            kind: "NamespaceContentRemaining",
            holds: true,
            reason: "SomeResourcesRemain",
            message: format!("Some resources are remaining: {}", listed(&kinds, "has")),
        },
    ];
    found.push(match finalizers.is_empty() {
        true => {
            fine("NamespaceFinalizersRemaining", "ContentHasNoFinalizers", "All content-preserving finalizers finished")
        }
        false => Condition {
            kind: "NamespaceFinalizersRemaining",
            holds: true,
            reason: "SomeFinalizersRemain",
            message: format!("Some content in the namespace has finalizers remaining: {}", listed(&finalizers, "in")),
        },
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_owns_goes_and_nothing_else() {
        use Owner::{Absent, Solid, Waiting};
        let owners = |list: &[Owner]| list.iter().enumerate().map(|(i, o)| (i.to_string(), *o)).collect::<Vec<_>>();
        let living = |list: &[Owner], dependents| Seen { owners: owners(list), dependents, ..Seen::default() };
        let deleting = |finalizer: &str, blocking| Seen {
            deleting: true,
            finalizers: vec![finalizer.into(), "other/one".into()],
            dependents: 2,
            blocking,
            ..Seen::default()
        };
        let marked = |finalizer: &str| Seen { finalizers: vec![finalizer.into()], ..living(&[Absent], 0) };
        for (case, seen, want) in [
            ("no owner at all", living(&[], 0), Decision::Keep),
            ("its owner is there", living(&[Solid], 3), Decision::Keep),
            ("its only owner is gone", living(&[Absent], 0), Decision::Delete(Propagation::Background)),
            ("all of its owners are gone", living(&[Absent, Absent], 1), Decision::Delete(Propagation::Background)),
            ("one of its owners is gone", living(&[Solid, Absent], 0), Decision::Disown(vec!["1".into()])),
            ("one of its owners wants it gone", living(&[Waiting, Solid], 0), Decision::Disown(vec!["0".into()])),
            ("its owner waits for it", living(&[Waiting], 0), Decision::Delete(Propagation::Background)),
            ("its owner waits for all below", living(&[Waiting], 1), Decision::Delete(Propagation::Foreground)),
            ("it was to orphan its own", marked(ORPHAN), Decision::Delete(Propagation::Orphan)),
            ("it was to outlive its own", marked(FOREGROUND), Decision::Delete(Propagation::Foreground)),
            ("deleted, orphaning", deleting(ORPHAN, 1), Decision::Orphan),
            ("deleted, blocked", deleting(FOREGROUND, 1), Decision::Await("dependents that block its deletion")),
            ("deleted, nobody blocks", deleting(FOREGROUND, 0), Decision::Release(FOREGROUND)),
            ("deleted, somebody else's business", deleting("a/b", 1), Decision::Keep),
        ] {
            assert_eq!(object(&seen), want, "{case}");
        }
    }

    #[test]
    fn a_namespace_goes_after_all_that_is_in_it() {
        let content = |kind: &str, deleting| Content {
            kind: kind.into(),
            deleting,
            finalizers: if deleting { vec!["a/b".into()] } else { Vec::new() },
        };
        let seen = |content: Vec<Content>| SeenNamespace { deleting: true, finalizers: vec![CONTENT.into()], content };
        assert_eq!(namespace(&SeenNamespace::default()), Namespace::Keep);
        let free = SeenNamespace { finalizers: vec!["a/b".into()], ..seen(vec![]) };
        assert_eq!(namespace(&free), Namespace::Keep, "let go already");
        assert_eq!(namespace(&seen(vec![])), Namespace::Finalize);
        let pods_first = seen(vec![content("configmaps.", false), content("pods.", false)]);
        assert_eq!(namespace(&pods_first), Namespace::Empty(vec!["pods.".into()]));
        let rest = seen(vec![content("configmaps.", false), content("pods.", true), content("configmaps.", false)]);
        assert_eq!(namespace(&rest), Namespace::Empty(vec!["configmaps.".into()]));
        let Namespace::Await(conditions) = namespace(&seen(vec![content("pods.", true)])) else {
            panic!("what is left is waited for")
        };
        let holding: Vec<_> = conditions.iter().filter(|c| c.holds).collect();
        assert_eq!(holding[0].message, "Some resources are remaining: pods. has 1 resource instances");
        assert_eq!(holding[1].kind, "NamespaceFinalizersRemaining");
    }
}
