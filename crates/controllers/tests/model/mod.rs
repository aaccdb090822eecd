//! The simulation: one server, the actors, a user, and the invariants.

mod actor;
mod server;

use std::collections::BTreeMap;

use actor::{Actor, Role};
use cleat_api::claim::{self, claim_phase, volume_name, volume_phase};
use cleat_api::key::Meta as _;
use cleat_api::names;
use cleat_testing::build;
use server::Server;

const CLAIMS: [&str; 3] = ["a", "b", "c"];
const VOLUMES: [&str; 3] = ["x", "y", "z"];

pub(crate) struct Simulation {
    server: Server,
    actors: Vec<Actor>,
}

impl Simulation {
    pub(crate) fn new() -> Self {
        let actors = vec![Actor::new(Role::Binder), Actor::new(Role::Binder), Actor::new(Role::Provisioner)];
        Self { server: Server::default(), actors }
    }

    /// Executes one random step: a user request, a delivery of events, a lost or repeated wake-up, a restart, or a
    /// write.
    pub(crate) fn step(&mut self, choice: u16) {
        let (step, rest) = (choice % 32, usize::from(choice / 32));
        let actor = rest % self.actors.len();
        let detail = rest / self.actors.len();
        match step {
            0..=3 => self.user_request(detail),
            4..=11 => self.actors[actor].receive_events(&self.server, detail),
            12 => self.actors[actor].lose_wakeup(detail),
            13 => self.actors[actor].repeat_wakeup(detail),
            14 if detail.is_multiple_of(4) => self.actors[actor].restart(&self.server),
            _ => self.actors[actor].act(&mut self.server, detail),
        }
    }

    fn user_request(&mut self, choice: usize) {
        let name = |names: &[&str]| names[choice / 8 % names.len()].to_owned();
        match choice % 8 {
            // Claims for existing volumes, claims for the provisioner, and claims that name their volume.
            0..=3 => {
                let class = if choice.is_multiple_of(2) { "static" } else { "dynamic" };
                let mut claim = build::claim("ns", &name(&CLAIMS), Some(class), "1Gi");
                if choice % 8 == 2 {
                    claim.spec.as_mut().unwrap().volume_name = Some(VOLUMES[choice / 24 % 3].to_owned());
                }
                self.server.create_claim(claim);
            }
            4 | 5 => {
                let mut volume = build::volume(&name(&VOLUMES), "static", "2Gi");
                volume.spec.as_mut().unwrap().persistent_volume_reclaim_policy = Some("Retain".to_owned());
                if choice % 8 == 5 && (choice / 24).is_multiple_of(3) {
                    // Reserved for a claim by its name, without a uid.
                    let mut reference = build::reference(&build::claim("ns", CLAIMS[choice / 72 % 3], None, "1Gi"));
                    reference.uid = None;
                    reference.resource_version = None;
                    volume.spec.as_mut().unwrap().claim_ref = Some(reference);
                }
                volume.status.as_mut().unwrap().phase = Some("Pending".to_owned());
                self.server.create_volume(volume);
            }
            6 => self.server.delete_claim(&name(&CLAIMS)),
            _ => self.server.delete_volume(&name(&VOLUMES)),
        }
    }

    /// Relists every actor and runs, without restarts and lost wake-ups, until no actor has work. Panics after 20,000
    /// rounds.
    pub(crate) fn run_until_idle(&mut self) {
        for actor in &mut self.actors {
            actor.relist(&self.server);
        }
        for round in 0.. {
            assert!(
                round < 20_000,
                "the actors never become idle: {:?}",
                self.actors.iter().map(Actor::pending_work).collect::<Vec<_>>()
            );
            let mut busy = false;
            for actor in &mut self.actors {
                actor.receive_events(&self.server, usize::MAX);
                actor.act(&mut self.server, round);
                busy |= actor.is_busy(&self.server);
            }
            if !busy {
                return;
            }
        }
    }

    /// Checks the invariants that hold after every write.
    pub(crate) fn check_invariants(&self) {
        let mut bound: BTreeMap<&str, &str> = BTreeMap::new();
        for (name, claim) in &self.server.claims {
            // Bound volumes are protected from deletion: a claim that is Lost was bound before its volume was Bound.
            assert_ne!(claim_phase(claim), "Lost", "{name}");
            if claim_phase(claim) != "Bound" {
                continue;
            }
            let volume = volume_name(claim).expect("a Bound claim names a volume");
            if let Some(other) = bound.insert(volume, name) {
                panic!("{volume} is bound to {other} and to {name}");
            }
            let existing =
                self.server.volumes.get(volume).unwrap_or_else(|| panic!("{name} is Bound to {volume}, which is gone"));
            let reserved = claim::claim_ref(existing).and_then(|r| r.uid.as_deref());
            assert_eq!(
                reserved,
                Some(claim.metadata.uid()),
                "{name} is Bound to {volume}, which is not reserved for it"
            );
        }
    }

    /// Checks the invariants that hold when no actor has work.
    pub(crate) fn check_idle_invariants(&self) {
        self.check_invariants();
        let server = &self.server;
        for (name, volume) in &server.volumes {
            let owner = claim::claim_ref(volume).and_then(|r| r.uid.as_deref()).filter(|uid| !uid.is_empty());
            let existing = owner.and_then(|uid| server.claims.values().find(|c| c.metadata.uid() == uid));
            let want = match (owner, existing) {
                (None, _) => "Available",
                (Some(_), Some(claim)) => {
                    assert_eq!(
                        volume_name(claim),
                        Some(name.as_str()),
                        "{name} is reserved for a claim that has another"
                    );
                    assert_eq!(claim_phase(claim), "Bound", "{name} is reserved for a claim that is not bound");
                    "Bound"
                }
                (Some(_), None) => "Released",
            };
            assert_eq!(volume_phase(volume), want, "{name}");
            let is_provisioned = name.starts_with("pvc-");
            assert!(!(is_provisioned && want == "Released"), "{name} is released and not deleted");
        }
        for (name, claim) in &server.claims {
            assert!(!claim.metadata.is_deleting(), "{name} is not deleted");
            assert!(
                claim.metadata.finalizers.iter().flatten().all(|f| f != "cleat.dev/provisioning"),
                "{name} has the finalizer though no volume is being created"
            );
            let is_dynamic = claim::claim_class(claim) == Some("dynamic");
            if is_dynamic && volume_name(claim).is_none() {
                panic!("{name} has a provisioner and no volume");
            }
            let has_available =
                server.volumes.values().any(|v| volume_phase(v) == "Available" && claim::claim_ref(v).is_none());
            let is_waiting = claim_phase(claim) == "Pending" && volume_name(claim).is_none();
            assert!(!(is_waiting && has_available && !is_dynamic), "{name} waits though a volume is available");
        }
        let recorded = server.volumes.keys().filter(|name| name.starts_with("pvc-")).cloned();
        assert_eq!(
            server.backend.iter().cloned().collect::<Vec<_>>(),
            recorded.collect::<Vec<_>>(),
            "volumes of the driver, and recorded volumes"
        );
        let expected = server.claims.values().map(|c| names::provisioned_volume(c.metadata.uid()));
        let expected: Vec<_> = expected.collect();
        assert!(server.backend.iter().all(|name| expected.contains(name)), "a volume without a claim is left");
    }
}
