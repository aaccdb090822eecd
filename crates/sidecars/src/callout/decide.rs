//! What an attachment of a FlexVolume needs next. Pure.

use cleat_api::flex::{self, FlexVolume};
use cleat_api::key::Meta as _;
use cleat_api::names;
use cleat_flex::DriverState as State;
use k8s_openapi::api::storage::v1::VolumeAttachment;

#[derive(Clone, Debug)]
pub struct Seen {
    /// `None` if what the attachment describes cannot be understood.
    pub volume: Option<FlexVolume>,
    pub driver: State,
    pub leaving: bool,
    /// Our finalizer is on it.
    pub held: bool,
    pub attached: bool,
    /// The driver is to be asked whether the attachment is true.
    pub doubted: bool,
}

impl Seen {
    pub fn new(attachment: &VolumeAttachment, driver: impl FnOnce(&str) -> State, doubted: bool) -> Self {
        let volume = FlexVolume::from_attachment(attachment);
        Self {
            driver: volume.as_ref().map_or(State::Absent, |volume| driver(&volume.driver)),
            leaving: attachment.metadata.is_deleting(),
            held: attachment.metadata.has_finalizer(&finalizer()),
            attached: attachment.status.as_ref().is_some_and(|s| s.attached),
            doubted,
            volume,
        }
    }
}

pub fn finalizer() -> String {
    names::attacher_finalizer(flex::ATTACHER)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Nothing,
    /// The driver has not said yet what it can do; it wakes us when it has.
    AwaitDriver,
    Attach {
        volume: FlexVolume,
        hold: bool,
    },
    /// Ask whether it is attached.
    Verify(FlexVolume),
    Detach(FlexVolume),
    /// Cannot be tried; said in the status.
    Refuse {
        attaching: bool,
        why: Refusal,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The driver is absent or does not start; it says why when asked.
    Driver(String),
    AttachesNothing(String),
    Unintelligible,
}

pub fn attachment(seen: &Seen) -> Decision {
    let attaching = !seen.leaving;
    if (seen.leaving && !seen.held) || (attaching && seen.attached && !seen.doubted) {
        return Decision::Nothing;
    }
    let refuse = |why| Decision::Refuse { attaching, why };
    let Some(volume) = seen.volume.clone() else { return refuse(Refusal::Unintelligible) };
    match (&seen.driver, attaching, seen.attached) {
        // Nothing can be asked, and nothing speaks against what is written.
        (State::Absent | State::Failing(_) | State::Starting, true, true) => Decision::Nothing,
        (State::Starting, _, _) => Decision::AwaitDriver,
        (State::Absent | State::Failing(_), _, _) => refuse(Refusal::Driver(volume.driver)),
        (State::Ready(_), true, true) => Decision::Verify(volume),
        (State::Ready(can), true, false) if !can.attach => refuse(Refusal::AttachesNothing(volume.driver)),
        (State::Ready(_), true, false) => Decision::Attach { hold: !seen.held, volume },
        // Also where the driver attaches nothing any more: what it was called for has to be undone.
        (State::Ready(_), false, _) => Decision::Detach(volume),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_flex::Capabilities;

    fn volume() -> FlexVolume {
        let described = serde_json::json!({ "name": "data", "flexVolume": { "driver": "acme/disk" } });
        FlexVolume::from_pod_volume(&serde_json::from_value(described).unwrap()).unwrap()
    }

    #[test]
    fn an_attachment_gets_what_it_needs_next() {
        let ready = State::Ready(Capabilities::default());
        let mounts_only = State::Ready(Capabilities { attach: false, ..Capabilities::default() });
        let failing = State::Failing("no".to_owned());
        let new = Seen {
            volume: Some(volume()),
            driver: ready.clone(),
            leaving: false,
            held: false,
            attached: false,
            doubted: false,
        };
        let held = Seen { held: true, ..new.clone() };
        let attached = Seen { attached: true, ..held.clone() };
        let doubted = Seen { doubted: true, ..attached.clone() };
        let leaving = Seen { leaving: true, ..attached.clone() };
        let refused = |attaching| Decision::Refuse { attaching, why: Refusal::Driver("acme/disk".to_owned()) };
        let nothing = || Decision::Refuse { attaching: true, why: Refusal::AttachesNothing("acme/disk".to_owned()) };
        let unclear = |attaching| Decision::Refuse { attaching, why: Refusal::Unintelligible };
        let with = |seen: &Seen, driver: &State| Seen { driver: driver.clone(), ..seen.clone() };
        let odd = |seen: &Seen| Seen { volume: None, driver: State::Absent, ..seen.clone() };
        for (case, seen, want) in [
            ("new", new.clone(), Decision::Attach { volume: volume(), hold: true }),
            ("begun before", held.clone(), Decision::Attach { volume: volume(), hold: false }),
            ("attached", attached.clone(), Decision::Nothing),
            ("attached, its driver is gone", with(&attached, &State::Absent), Decision::Nothing),
            ("attached and doubted", doubted.clone(), Decision::Verify(volume())),
            ("doubted, and nobody to ask", with(&doubted, &State::Absent), Decision::Nothing),
            ("leaving", leaving.clone(), Decision::Detach(volume())),
            ("leaving, never confirmed", Seen { attached: false, ..leaving.clone() }, Decision::Detach(volume())),
            ("leaving, never called for", Seen { held: false, ..leaving.clone() }, Decision::Nothing),
            ("leaving, and doubted", Seen { doubted: true, ..leaving.clone() }, Decision::Detach(volume())),
            ("the driver is starting", with(&new, &State::Starting), Decision::AwaitDriver),
            ("leaving, the driver is starting", with(&leaving, &State::Starting), Decision::AwaitDriver),
            ("no driver", with(&new, &State::Absent), refused(true)),
            ("leaving, no driver", with(&leaving, &State::Absent), refused(false)),
            ("a driver that does not start", with(&new, &failing), refused(true)),
            ("leaving, a driver that does not start", with(&leaving, &failing), refused(false)),
            ("a driver that only mounts", with(&new, &mounts_only), nothing()),
            ("leaving, now only mounted", with(&leaving, &mounts_only), Decision::Detach(volume())),
            ("not understood", odd(&new), unclear(true)),
            ("not understood, leaving", odd(&leaving), unclear(false)),
            ("not understood, and never called for", Seen { held: false, ..odd(&leaving) }, Decision::Nothing),
        ] {
            assert_eq!(attachment(&seen), want, "{case}");
        }
    }
}
