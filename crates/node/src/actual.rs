//! What is, or may be, staged and published on this node. Changed only by the outcome of operations; pure.

use std::collections::BTreeMap;

use cleat_csi::ErrorClass;

use crate::layout::PodUid;

/// Whether a volume is mounted at a path. `Uncertain` counts as mounted for steps that unmount (it must be unpublished and
/// unstaged), and as not mounted for steps that need the mount (it must be staged again before a publish).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    #[default]
    Absent,
    Uncertain,
    Present,
}

impl Presence {
    pub fn may_be_present(self) -> bool {
        self != Presence::Absent
    }
}

/// Whether this process made the call, or found the record of an earlier run at its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Provenance {
    #[default]
    ThisRun,
    /// The mount may have been used for a long time: a failed repetition of the call does not prove that it is absent.
    Reconstructed,
}

/// The state of one mount: a staging path, or the target path of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountState {
    pub presence: Presence,
    pub provenance: Provenance,
}

impl MountState {
    /// A record of an earlier run was found.
    pub fn reconstructed() -> MountState {
        MountState { presence: Presence::Uncertain, provenance: Provenance::Reconstructed }
    }

    /// The state from the moment before the call is sent: it may have taken effect.
    #[must_use]
    pub fn call_started(self) -> MountState {
        match self.presence {
            Presence::Absent => MountState { presence: Presence::Uncertain, provenance: Provenance::ThisRun },
            Presence::Uncertain | Presence::Present => self,
        }
    }

    /// The call has succeeded.
    pub fn mounted() -> MountState {
        MountState { presence: Presence::Present, provenance: Provenance::ThisRun }
    }

    /// The state after a failed call. `self` is the state before [`MountState::call_started`].
    #[must_use]
    pub fn call_failed(self, class: ErrorClass) -> MountState {
        match (self.presence, self.provenance, class) {
            (_, _, ErrorClass::Transient) | (Presence::Present, _, _) => self,
            (Presence::Absent, _, ErrorClass::Final) => self,
            (Presence::Uncertain, Provenance::Reconstructed, _) => self,
            (Presence::Uncertain, Provenance::ThisRun, ErrorClass::Final) => MountState::default(),
            (Presence::Absent | Presence::Uncertain, _, ErrorClass::Uncertain) => {
                MountState { presence: Presence::Uncertain, provenance: Provenance::ThisRun }
            }
        }
    }

    /// The state after a failed unpublish or unstage, which may have taken effect partly.
    #[must_use]
    pub fn undo_failed(self) -> MountState {
        MountState { presence: Presence::Uncertain, ..self }
    }
}

/// A volume as published for one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedVolume {
    pub state: MountState,
    /// The name of the PersistentVolume under which it was published; it is also the name of its directory.
    pub spec_name: String,
}

/// The mounts of one volume on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActualVolume {
    pub staged: MountState,
    pub pods: BTreeMap<PodUid, PublishedVolume>,
}

impl ActualVolume {
    pub fn published(&self, uid: &str) -> MountState {
        self.pods.get(uid).map(|p| p.state).unwrap_or_default()
    }

    /// Sets the state for a pod. An absent state removes the entry.
    pub fn set_published(&mut self, uid: &str, spec_name: &str, state: MountState) {
        if state.presence.may_be_present() {
            self.pods.insert(uid.to_owned(), PublishedVolume { state, spec_name: spec_name.to_owned() });
        } else {
            self.pods.remove(uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ErrorClass::{Final, Transient, Uncertain as Unknown};
    use Presence::*;

    #[test]
    fn a_failed_call_changes_only_what_it_proves() {
        let own = |presence| MountState { presence, provenance: Provenance::ThisRun };
        for (case, before, class, want) in [
            ("refused before anything happened", own(Absent), Final, own(Absent)),
            ("no answer: it may be there", own(Absent), Unknown, own(Uncertain)),
            ("nothing was started", own(Absent), Transient, own(Absent)),
            ("the repetition was refused: it is not there", own(Uncertain), Final, own(Absent)),
            ("still no answer", own(Uncertain), Unknown, own(Uncertain)),
            ("still nothing started", own(Uncertain), Transient, own(Uncertain)),
            (
                "reconstructed: a refusal proves nothing",
                MountState::reconstructed(),
                Final,
                MountState::reconstructed(),
            ),
            ("a repeated publish failed: it stays mounted", own(Present), Final, own(Present)),
        ] {
            assert_eq!(before.call_failed(class), want, "{case}");
        }
    }

    #[test]
    fn a_started_call_counts_until_its_outcome_is_known() {
        assert_eq!(MountState::default().call_started().presence, Uncertain);
        assert_eq!(MountState::mounted().call_started().presence, Present);
        assert_eq!(MountState::reconstructed().call_started(), MountState::reconstructed());
        assert_eq!(MountState::mounted().undo_failed().presence, Uncertain);
    }
}
