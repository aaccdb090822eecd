//! What is staged and published on this node, and what may be. Changed only by the outcome of operations; pure.

use std::collections::BTreeMap;

use cleat_csi::Class;

use crate::layout::PodUid;

/// Whether an effect is in place. `Uncertain` counts as "there" for everyone who wants to take away what is below it, and
/// as "not there" for everyone who wants to build upon it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    #[default]
    Absent,
    Uncertain,
    Present,
}

impl Presence {
    pub fn possible(self) -> bool {
        self != Presence::Absent
    }
}

/// Whether this process saw an effect come about, or found traces of it at its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    #[default]
    Own,
    /// It may have worked for years: a failed repetition does not prove that it is gone.
    Found,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    pub presence: Presence,
    pub origin: Origin,
}

impl Effect {
    pub fn found() -> Effect {
        Effect { presence: Presence::Uncertain, origin: Origin::Found }
    }

    /// The call is about to be made: from here on it may have happened.
    #[must_use]
    pub fn begun(self) -> Effect {
        match self.presence {
            Presence::Absent => Effect { presence: Presence::Uncertain, origin: Origin::Own },
            Presence::Uncertain | Presence::Present => self,
        }
    }

    pub fn done() -> Effect {
        Effect { presence: Presence::Present, origin: Origin::Own }
    }

    /// The call that was made in state `self` (before [`Effect::begun`]) failed.
    #[must_use]
    pub fn failed(self, class: Class) -> Effect {
        match (self.presence, self.origin, class) {
            (_, _, Class::Transient) | (Presence::Present, _, _) => self,
            (Presence::Absent, _, Class::Final) => self,
            (Presence::Uncertain, Origin::Found, _) => self,
            (Presence::Uncertain, Origin::Own, Class::Final) => Effect::default(),
            (Presence::Absent | Presence::Uncertain, _, Class::Uncertain) => {
                Effect { presence: Presence::Uncertain, origin: Origin::Own }
            }
        }
    }

    /// The inverse call failed: nobody knows how far it got.
    #[must_use]
    pub fn undo_failed(self) -> Effect {
        Effect { presence: Presence::Uncertain, ..self }
    }
}

/// One volume of one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    pub effect: Effect,
    /// The name of the PersistentVolume it was published under, which is the name of its directory.
    pub spec_name: String,
}

/// One volume on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actual {
    pub staged: Effect,
    pub pods: BTreeMap<PodUid, Published>,
}

impl Actual {
    pub fn published(&self, uid: &str) -> Effect {
        self.pods.get(uid).map(|p| p.effect).unwrap_or_default()
    }

    /// Records the outcome for a pod; an absent effect leaves no entry.
    pub fn set_published(&mut self, uid: &str, spec_name: &str, effect: Effect) {
        if effect.presence.possible() {
            self.pods.insert(uid.to_owned(), Published { effect, spec_name: spec_name.to_owned() });
        } else {
            self.pods.remove(uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Class::{Final, Transient, Uncertain as Unsure};
    use Presence::*;

    #[test]
    fn failures_change_only_what_they_prove() {
        let own = |presence| Effect { presence, origin: Origin::Own };
        for (case, before, class, want) in [
            ("refused before anything happened", own(Absent), Final, own(Absent)),
            ("no answer: it may be there", own(Absent), Unsure, own(Uncertain)),
            ("nothing was started", own(Absent), Transient, own(Absent)),
            ("the repetition was refused: it is not there", own(Uncertain), Final, own(Absent)),
            ("still no answer", own(Uncertain), Unsure, own(Uncertain)),
            ("still nothing started", own(Uncertain), Transient, own(Uncertain)),
            ("found at start: a refusal proves nothing", Effect::found(), Final, Effect::found()),
            ("a repeated publish failed: it stays mounted", own(Present), Final, own(Present)),
        ] {
            assert_eq!(before.failed(class), want, "{case}");
        }
    }

    #[test]
    fn a_begun_call_counts_until_its_end_is_known() {
        assert_eq!(Effect::default().begun().presence, Uncertain);
        assert_eq!(Effect::done().begun().presence, Present);
        assert_eq!(Effect::found().begun(), Effect::found());
        assert_eq!(Effect::done().undo_failed().presence, Uncertain);
    }
}
