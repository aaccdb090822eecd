//! Where should a pod go, and what must be written first? Pure: the picture is a [`World`], time is given.
//!
//! A pod is placed in three steps. It is given a node that takes it. If claims of it are not bound, the volumes chosen for
//! them are set aside and the node is written on the claims to be provisioned: from then on the pod has its place there, and
//! waits. When the binder has bound them all, the pod is bound to the node.

mod demand;
mod fit;
mod host;
mod needs;
mod picture;
mod score;
mod volumes;
mod why;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleat_api::claim::{claim_class, claim_ref, claim_ref_key, is_reserved_for, requested_storage, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::annotation;
use cleat_api::pod::claim_volumes;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod};
use kube::Resource as _;

pub use picture::Stock;
pub use why::{Causes, Reason, Unready, Why};
pub use world::{SCHEDULER, World};

use host::Host;
use needs::{Needs, is_bound};
use score::Candidate;
use world::Acting;

/// How long a pod keeps its place while its volumes are made and bound.
pub const BIND_TIMEOUT: SignedDuration = SignedDuration::from_secs(600);

#[derive(Clone, Debug)]
pub enum Decision {
    /// The pod has its place. Set these volumes aside, then write the node on these claims.
    Reserve { node: String, volumes: Vec<Arc<PersistentVolume>>, claims: Vec<Arc<PersistentVolumeClaim>> },
    /// Its volumes are being made and bound.
    Await,
    /// Everything is there.
    Bind { node: String },
    /// No node takes it.
    Wait(Why),
    /// It had a place, and lost it.
    GiveUp { message: String },
}

/// What became of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Failed,
}

impl World {
    /// Decides about the next pod for which something happened, and assumes that the decision is carried out. Except for
    /// `Await`, [`World::finished`] must be told how it went before the pod is decided about again.
    pub fn next(&mut self, now: Timestamp) -> Option<(Arc<Pod>, Decision)> {
        loop {
            let (_, _, key) = self.ready.pop_first()?;
            let Some(pod) = self.waiting.get(&key).map(|waiting| waiting.pod.clone()) else { continue };
            let is_reserved = self.placed.get(&key).is_some_and(|placed| placed.reserved.is_some());
            let decision = if is_reserved { self.follow(&key, &pod, now) } else { self.place(&key, &pod, now) };
            let mut acting = Acting { uid: pod.metadata.uid().to_owned(), ..Acting::default() };
            match &decision {
                Decision::Await => return Some((pod, decision)),
                // What it says already needs no writing.
                Decision::Wait(why) if world::says(&pod, &why.to_string()) => return Some((pod, decision)),
                Decision::Reserve { volumes, claims, .. } => {
                    acting.volumes = volumes.iter().filter_map(|v| v.metadata.name.clone()).collect();
                    acting.claims = claims.iter().map(|c| Key::of(&c.metadata)).collect();
                }
                Decision::Bind { .. } | Decision::Wait(_) | Decision::GiveUp { .. } => {}
            }
            self.acting.insert(key, acting);
            return Some((pod, decision));
        }
    }

    /// The decision about a pod was carried out, or could not be: then it has no place any more, and
    /// [`World::retry`] gives it its next turn.
    pub fn finished(&mut self, key: &Key, decision: &Decision, outcome: Outcome) {
        let Some(acting) = self.acting.remove(key) else { return };
        match (decision, outcome) {
            (Decision::Reserve { .. } | Decision::Bind { .. }, Outcome::Failed) => {
                let set_aside =
                    acting.volumes.iter().filter_map(|v| Some(claim_ref_key(claim_ref(&*self.volume(v)?)?)));
                let claims: BTreeSet<Key> = set_aside.chain(acting.claims.iter().cloned()).collect();
                acting.claims.iter().for_each(|claim| self.revert_claim(claim));
                acting.volumes.iter().for_each(|volume| self.assume_volume(volume, None));
                // Others may have counted on what was assumed for this pod, with nothing left to write themselves.
                claims.iter().for_each(|claim| self.wake_other_users(claim, key));
                if self.placed.get(key).is_some_and(|placed| placed.reserved.is_some() && placed.uid == acting.uid) {
                    self.vacate(key);
                }
            }
            (Decision::Reserve { .. }, Outcome::Done) => self.wake_pod(key),
            // The watch will show where it is.
            (Decision::Bind { .. }, Outcome::Done) => {
                if self.waiting.get(key).is_some_and(|waiting| waiting.pod.metadata.uid() == acting.uid) {
                    self.acting.insert(key.clone(), Acting { is_bound: true, ..acting });
                    return;
                }
            }
            (Decision::Await | Decision::Wait(_) | Decision::GiveUp { .. }, _) => {}
        }
        let is_another = self.waiting.get(key).is_some_and(|waiting| waiting.pod.metadata.uid() != acting.uid);
        if acting.again || is_another {
            self.wake_pod(key);
        }
    }

    pub fn retry(&mut self, key: &Key) {
        self.wake_pod(key);
    }

    /// Gives those another turn whose time is up, and says when the next one's is.
    pub fn expire(&mut self, now: Timestamp) -> Option<Timestamp> {
        let ends = |since: Timestamp| since.checked_add(BIND_TIMEOUT).unwrap_or(Timestamp::MAX);
        let over = self.reserved_since.iter().take_while(|(since, _)| ends(*since) <= now);
        let over: Vec<Key> = over.map(|(_, key)| key.clone()).collect();
        over.iter().for_each(|key| self.wake_pod(key));
        self.reserved_since.iter().map(|(since, _)| ends(*since)).find(|end| *end > now)
    }

    fn place(&mut self, key: &Key, pod: &Arc<Pod>, now: Timestamp) -> Decision {
        let nodes = self.hosts.values().filter(|host| host.facts.is_some()).count();
        let found = match self.needs(key, pod) {
            _ if nodes == 0 => Err(Why::NoNodes),
            Err(unready) => Err(Why::Claims { nodes, unready }),
            Ok(needs) => self.search(key, &needs, nodes),
        };
        let (node, choice) = match found {
            Ok(found) => found,
            Err(why) => {
                if let Some(waiting) = self.waiting.get_mut(key) {
                    waiting.causes = why.causes();
                }
                return Decision::Wait(why);
            }
        };
        if let Some(waiting) = self.waiting.get_mut(key) {
            waiting.causes = Causes::NONE;
            // Back where it failed before: everywhere else it failed too, or cannot go.
            if waiting.returned.contains(&node) {
                waiting.returned.clear();
            }
        }
        self.occupy(key, pod, &node, Some(now));
        if choice.taken.is_empty() && choice.provisioned.is_empty() {
            return Decision::Bind { node };
        }
        self.reserve(key, node, choice)
    }

    /// Assumes the choice, and tells what of it has to be written.
    fn reserve(&mut self, key: &Key, node: String, choice: fit::Choice) -> Decision {
        let (mut volumes, mut claims) = (Vec::new(), Vec::new());
        let mut taken = BTreeMap::new();
        for (volume, claim) in choice.taken {
            let name = volume.metadata.name.clone().unwrap_or_default();
            taken.insert(Key::of(&claim.metadata), name.clone());
            if let Some(mine) = set_aside(&volume, &claim) {
                let mine = Arc::new(mine);
                self.assume_volume(&name, Some(mine.clone()));
                volumes.push(mine);
            }
        }
        for claim in choice.provisioned {
            if claim.metadata.annotation(annotation::SELECTED_NODE) == Some(&node) {
                continue;
            }
            let of = Key::of(&claim.metadata);
            let bytes = requested_storage(&claim).map_or(0, |q| q.to_bytes());
            self.promise(key, &of, claim_class(&claim).unwrap_or_default(), bytes);
            let mut selected = claim.as_ref().clone();
            let annotations = selected.metadata.annotations.get_or_insert_default();
            annotations.insert(annotation::SELECTED_NODE.to_owned(), node.clone());
            let selected = Arc::new(selected);
            self.assume_claim(&of, selected.clone());
            claims.push(selected);
        }
        if let Some(placed) = self.placed.get_mut(key) {
            placed.taken = taken;
        }
        // The volumes that were taken are known by their handles now.
        self.recount(key);
        if volumes.is_empty() && claims.is_empty() {
            return Decision::Await;
        }
        Decision::Reserve { node, volumes, claims }
    }

    fn search(&self, key: &Key, needs: &Needs, nodes: usize) -> Result<(String, fit::Choice), Why> {
        let returned = self.waiting.get(key).map(|waiting| &waiting.returned);
        let mut candidates = Vec::new();
        let mut reasons = BTreeMap::new();
        for (name, host) in &self.hosts {
            let Some(facts) = &host.facts else { continue };
            match self.fit(host, facts, needs) {
                Ok(choice) => {
                    let was_returned = returned.is_some_and(|returned| returned.contains(name));
                    candidates.push(Candidate { name, host, facts, choice, was_returned });
                }
                Err(why) => why.into_iter().for_each(|reason| *reasons.entry(reason).or_default() += 1),
            }
        }
        let best = self.best(needs, candidates);
        best.map(|best| (best.name.to_owned(), best.choice)).ok_or(Why::Nodes { nodes, reasons })
    }

    /// A pod that has its place: are its volumes there, or still to be expected?
    fn follow(&mut self, key: &Key, pod: &Arc<Pod>, now: Timestamp) -> Decision {
        let Some(placed) = self.placed.get(key) else { return Decision::Await };
        let node = placed.node.clone();
        let is_late = placed.reserved.is_some_and(|since| now.duration_since(since) >= BIND_TIMEOUT);
        let host = self.hosts.get(&node).and_then(|host| Some((host, &host.facts.as_ref()?.node)));
        let verdict = match host {
            None => Err(Lost::Place(format!("node {node:?} not found"))),
            Some((host, node)) => self.progress(pod, host, node, &placed.taken),
        };
        match verdict {
            Ok(Progress::Ready) => return Decision::Bind { node },
            Ok(Progress::Coming) if !is_late => return Decision::Await,
            Ok(Progress::Coming) | Err(_) => {}
        }
        self.vacate(key);
        let message = match verdict {
            Err(Lost::Returned(why)) => {
                if let Some(waiting) = self.waiting.get_mut(key) {
                    waiting.returned.insert(node);
                }
                why
            }
            Err(Lost::Place(why)) => why,
            Ok(_) => "context deadline exceeded".to_owned(),
        };
        Decision::GiveUp { message: format!("binding volumes: {message}") }
    }

    fn progress(&self, pod: &Pod, host: &Host, node: &Node, taken: &BTreeMap<Key, String>) -> Result<Progress, Lost> {
        let mut progress = Progress::Ready;
        for used in claim_volumes(pod) {
            let name = &used.claim.name;
            let Some(claim) = self.claim(&used.claim) else {
                return Err(Lost::Place(Unready::Missing(name.clone()).to_string()));
            };
            let volume = volume_name(&claim).and_then(|name| self.volume(name));
            let set_aside = || self.reserved_for(&used.claim).find(|v| is_reserved_for(v, &claim));
            let known = volume.clone().or_else(set_aside);
            if known.as_ref().is_some_and(|volume| !host.reaches(node, volume)) {
                return Err(Lost::Place(format!("volume of PVC {name:?} does not reach the node")));
            }
            match (claim.metadata.annotation(annotation::SELECTED_NODE), taken.get(&used.claim)) {
                _ if is_bound(&claim) && volume.is_some() => continue,
                // The binder is at it.
                _ if volume_name(&claim).is_some() || known.is_some() => {}
                (_, Some(volume)) => return Err(Lost::Place(format!("ClaimRef got reset for pv {volume:?}"))),
                (selected, None) if selected == node.metadata.name.as_deref() => {}
                (_, None) => return Err(Lost::Returned(format!("provisioning failed for PVC {name:?}"))),
            }
            progress = Progress::Coming;
        }
        Ok(progress)
    }
}

#[derive(Clone, Copy)]
enum Progress {
    Ready,
    Coming,
}

enum Lost {
    /// The provisioner cannot make the volume for this node.
    Returned(String),
    Place(String),
}

/// The volume with the claim written on it, unless it is there already.
fn set_aside(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<PersistentVolume> {
    let was_reserved = is_reserved_for(volume, claim);
    let spec = volume.spec.as_ref();
    let uid = spec.and_then(|s| s.claim_ref.as_ref()?.uid.as_deref()).unwrap_or_default();
    if was_reserved && uid == claim.metadata.uid() {
        return None;
    }
    let mut mine = volume.clone();
    let reference =
        ObjectReference { resource_version: claim.metadata.resource_version.clone(), ..claim.object_ref(&()) };
    mine.spec.get_or_insert_default().claim_ref = Some(reference);
    if !was_reserved {
        let annotations = mine.metadata.annotations.get_or_insert_default();
        annotations.insert(annotation::BOUND_BY_CONTROLLER.to_owned(), annotation::YES.to_owned());
    }
    Some(mine)
}

#[cfg(test)]
mod tests;
