//! Decides the next step for a VolumeAttachment of a FlexVolume. Pure.

use cleat_api::flex::{self, FlexVolume};
use cleat_api::names;
use cleat_flex::DriverState;

#[derive(Clone, Debug)]
pub struct FlexSnapshot {
    /// `None` if the attachment's inline volume spec is not a valid FlexVolume.
    pub volume: Option<FlexVolume>,
    pub driver: DriverState,
    pub deleting: bool,
    /// The attachment carries this attacher's [`finalizer`].
    pub has_finalizer: bool,
    pub attached: bool,
    /// The driver is to be asked whether the volume is still attached.
    pub needs_verification: bool,
}

pub fn finalizer() -> String {
    names::attacher_finalizer(flex::ATTACHER)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FlexDecision {
    Nothing,
    /// The driver has not reported its capabilities yet. The report queues the attachment again.
    AwaitDriver,
    Attach {
        volume: FlexVolume,
        add_finalizer: bool,
    },
    /// Ask the driver whether the volume is attached.
    Verify(FlexVolume),
    Detach(FlexVolume),
    /// The call cannot be made. The reason goes into the status.
    Refuse {
        attaching: bool,
        why: Refusal,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The driver with this name is absent or its `init` fails.
    DriverUnavailable(String),
    /// The driver with this name reports that it has no `attach`.
    AttachNotSupported(String),
    InvalidSpec,
}

pub fn attachment(snapshot: &FlexSnapshot) -> FlexDecision {
    let attaching = !snapshot.deleting;
    let never_called = snapshot.deleting && !snapshot.has_finalizer;
    let complete = attaching && snapshot.attached && !snapshot.needs_verification;
    if never_called || complete {
        return FlexDecision::Nothing;
    }
    let refuse = |why| FlexDecision::Refuse { attaching, why };
    let Some(volume) = snapshot.volume.clone() else { return refuse(Refusal::InvalidSpec) };
    match (&snapshot.driver, attaching, snapshot.attached) {
        // A verification without a usable driver: nothing contradicts the status.
        (DriverState::Absent | DriverState::Failing(_) | DriverState::Starting, true, true) => FlexDecision::Nothing,
        (DriverState::Starting, _, _) => FlexDecision::AwaitDriver,
        (DriverState::Absent | DriverState::Failing(_), _, _) => refuse(Refusal::DriverUnavailable(volume.driver)),
        (DriverState::Ready(_), true, true) => FlexDecision::Verify(volume),
        (DriverState::Ready(capabilities), true, false) if !capabilities.attach => {
            refuse(Refusal::AttachNotSupported(volume.driver))
        }
        (DriverState::Ready(_), true, false) => FlexDecision::Attach { add_finalizer: !snapshot.has_finalizer, volume },
        // Also if the driver no longer supports `attach`: an earlier `attach` has to be undone.
        (DriverState::Ready(_), false, _) => FlexDecision::Detach(volume),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_flex::Capabilities;

    fn volume() -> FlexVolume {
        let spec = serde_json::json!({ "name": "data", "flexVolume": { "driver": "acme/disk" } });
        FlexVolume::from_pod_volume(&serde_json::from_value(spec).unwrap()).unwrap()
    }

    #[test]
    fn each_state_of_an_attachment_has_one_next_step() {
        let ready = DriverState::Ready(Capabilities::default());
        let mounts_only = DriverState::Ready(Capabilities { attach: false, ..Capabilities::default() });
        let failing = DriverState::Failing("no".to_owned());
        let new = FlexSnapshot {
            volume: Some(volume()),
            driver: ready.clone(),
            deleting: false,
            has_finalizer: false,
            attached: false,
            needs_verification: false,
        };
        let finalized = FlexSnapshot { has_finalizer: true, ..new.clone() };
        let attached = FlexSnapshot { attached: true, ..finalized.clone() };
        let unverified = FlexSnapshot { needs_verification: true, ..attached.clone() };
        let deleting = FlexSnapshot { deleting: true, ..attached.clone() };
        let refused =
            |attaching| FlexDecision::Refuse { attaching, why: Refusal::DriverUnavailable("acme/disk".to_owned()) };
        let unsupported =
            || FlexDecision::Refuse { attaching: true, why: Refusal::AttachNotSupported("acme/disk".to_owned()) };
        let invalid = |attaching| FlexDecision::Refuse { attaching, why: Refusal::InvalidSpec };
        let with =
            |snapshot: &FlexSnapshot, driver: &DriverState| FlexSnapshot { driver: driver.clone(), ..snapshot.clone() };
        let without_volume =
            |snapshot: &FlexSnapshot| FlexSnapshot { volume: None, driver: DriverState::Absent, ..snapshot.clone() };
        for (case, snapshot, want) in [
            ("new", new.clone(), FlexDecision::Attach { volume: volume(), add_finalizer: true }),
            (
                "finalizer already written",
                finalized.clone(),
                FlexDecision::Attach { volume: volume(), add_finalizer: false },
            ),
            ("attached", attached.clone(), FlexDecision::Nothing),
            ("attached, its driver is gone", with(&attached, &DriverState::Absent), FlexDecision::Nothing),
            ("attached and to be verified", unverified.clone(), FlexDecision::Verify(volume())),
            ("to be verified, its driver is gone", with(&unverified, &DriverState::Absent), FlexDecision::Nothing),
            ("deleting", deleting.clone(), FlexDecision::Detach(volume())),
            (
                "deleting, never confirmed",
                FlexSnapshot { attached: false, ..deleting.clone() },
                FlexDecision::Detach(volume()),
            ),
            (
                "deleting, never called",
                FlexSnapshot { has_finalizer: false, ..deleting.clone() },
                FlexDecision::Nothing,
            ),
            (
                "deleting, and to be verified",
                FlexSnapshot { needs_verification: true, ..deleting.clone() },
                FlexDecision::Detach(volume()),
            ),
            ("the driver is starting", with(&new, &DriverState::Starting), FlexDecision::AwaitDriver),
            ("deleting, the driver is starting", with(&deleting, &DriverState::Starting), FlexDecision::AwaitDriver),
            ("no driver", with(&new, &DriverState::Absent), refused(true)),
            ("deleting, no driver", with(&deleting, &DriverState::Absent), refused(false)),
            ("a driver that does not start", with(&new, &failing), refused(true)),
            ("deleting, a driver that does not start", with(&deleting, &failing), refused(false)),
            ("a driver that only mounts", with(&new, &mounts_only), unsupported()),
            ("deleting, the driver only mounts now", with(&deleting, &mounts_only), FlexDecision::Detach(volume())),
            ("invalid spec", without_volume(&new), invalid(true)),
            ("invalid spec, deleting", without_volume(&deleting), invalid(false)),
            (
                "invalid spec, and never called",
                FlexSnapshot { has_finalizer: false, ..without_volume(&deleting) },
                FlexDecision::Nothing,
            ),
        ] {
            assert_eq!(attachment(&snapshot), want, "{case}");
        }
    }
}
