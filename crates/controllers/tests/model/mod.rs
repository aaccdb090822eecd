//! The server, the driver and the user of the model, and what must hold.

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

pub(crate) struct World {
    server: Server,
    actors: Vec<Actor>,
}

impl World {
    pub(crate) fn new() -> Self {
        let actors = vec![Actor::new(Role::Binder), Actor::new(Role::Binder), Actor::new(Role::Provisioner)];
        Self { server: Server::default(), actors }
    }

    /// One thing happens: somebody acts, hears, forgets or dies.
    pub(crate) fn step(&mut self, choice: u16) {
        let (what, which) = (choice % 32, usize::from(choice / 32));
        let who = which % self.actors.len();
        let detail = which / self.actors.len();
        match what {
            0..=3 => self.user(detail),
            4..=11 => self.actors[who].hear(&self.server, detail),
            12 => self.actors[who].forget_a_wake_up(detail),
            13 => self.actors[who].wake_twice(detail),
            14 if detail.is_multiple_of(4) => self.actors[who].die(&self.server),
            _ => self.actors[who].act(&mut self.server, detail),
        }
    }

    fn user(&mut self, choice: usize) {
        let name = |names: &[&str]| names[choice / 8 % names.len()].to_owned();
        match choice % 8 {
            // One claim in three is for volumes that exist, one is for the provisioner, one names its volume.
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
                    // Set aside for a claim, by its name.
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

    /// Nobody dies or forgets any more, and everybody hears everything.
    pub(crate) fn come_to_rest(&mut self) {
        for actor in &mut self.actors {
            actor.look_at_everything(&self.server);
        }
        for round in 0.. {
            assert!(
                round < 20_000,
                "they never come to rest: {:?}",
                self.actors.iter().map(Actor::busy).collect::<Vec<_>>()
            );
            let mut busy = false;
            for actor in &mut self.actors {
                actor.hear(&self.server, usize::MAX);
                actor.act(&mut self.server, round);
                busy |= actor.is_busy(&self.server);
            }
            if !busy {
                return;
            }
        }
    }

    /// Holds after every single write.
    pub(crate) fn check_always(&self) {
        let mut bound: BTreeMap<&str, &str> = BTreeMap::new();
        for (name, claim) in &self.server.claims {
            // Volumes go only where nothing is bound to them: a claim that lost its volume was bound too early.
            assert_ne!(claim_phase(claim), "Lost", "{name}");
            if claim_phase(claim) != "Bound" {
                continue;
            }
            let volume = volume_name(claim).expect("a Bound claim points at a volume");
            if let Some(other) = bound.insert(volume, name) {
                panic!("{volume} is bound to {other} and to {name}");
            }
            let there =
                self.server.volumes.get(volume).unwrap_or_else(|| panic!("{name} is Bound to {volume}, which is gone"));
            let reserved = claim::claim_ref(there).and_then(|r| r.uid.as_deref());
            assert_eq!(reserved, Some(claim.metadata.uid()), "{name} is Bound to {volume}, which is not its own");
        }
    }

    /// Holds when nobody has anything left to do.
    pub(crate) fn check_at_rest(&self) {
        self.check_always();
        let server = &self.server;
        for (name, volume) in &server.volumes {
            let owner = claim::claim_ref(volume).and_then(|r| r.uid.as_deref()).filter(|uid| !uid.is_empty());
            let alive = owner.and_then(|uid| server.claims.values().find(|c| c.metadata.uid() == uid));
            let want = match (owner, alive) {
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
            let made = name.starts_with("pvc-");
            assert!(!(made && want == "Released"), "{name} is released and nobody deletes it");
        }
        for (name, claim) in &server.claims {
            assert!(!claim.metadata.is_deleting(), "{name} does not go");
            assert!(
                claim.metadata.finalizers.iter().flatten().all(|f| f != "cleat.dev/provisioning"),
                "{name} is held though nothing is in the making"
            );
            let dynamic = claim::claim_class(claim) == Some("dynamic");
            if dynamic && volume_name(claim).is_none() {
                panic!("{name} is served by a provisioner and has no volume");
            }
            let free = server.volumes.values().any(|v| volume_phase(v) == "Available" && claim::claim_ref(v).is_none());
            let waits = claim_phase(claim) == "Pending" && volume_name(claim).is_none();
            assert!(!(waits && free && !dynamic), "{name} waits though a volume is free");
        }
        let recorded = server.volumes.keys().filter(|name| name.starts_with("pvc-")).cloned();
        assert_eq!(
            server.backend.iter().cloned().collect::<Vec<_>>(),
            recorded.collect::<Vec<_>>(),
            "what the driver has, and what is recorded"
        );
        let living = server.claims.values().map(|c| names::provisioned_volume(c.metadata.uid()));
        let living: Vec<_> = living.collect();
        assert!(server.backend.iter().all(|name| living.contains(name)), "a volume of nobody is left");
    }
}
