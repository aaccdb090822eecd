//! Does a node take a pod, and if so, with which volumes? Pure.

use std::collections::HashSet;
use std::sync::Arc;

use cleat_api::well_known::{label, taint};
use cleat_api::matching::{is_available_for, is_usable};
use cleat_api::selector::{self, topology_matches};
use cleat_api::toleration::tolerates;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Taint, Toleration};

use super::World;
use super::host::{Facts, Handle, Host, driver_of};
use super::needs::{Delayed, Needs};
use super::why::Reason;
use super::world::Report;

/// Classes whose volumes administrators make.
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";

/// What is to be done about a pod's unbound claims if it goes to one node.
#[derive(Clone, Debug, Default)]
pub(super) struct Choice {
    pub(super) taken: Vec<(Arc<PersistentVolume>, Arc<PersistentVolumeClaim>)>,
    pub(super) provisioned: Vec<Arc<PersistentVolumeClaim>>,
}

impl World {
    /// The reasons are those of the first question that the node fails. Where the pod's volumes can be is one question.
    pub(super) fn fit(&self, host: &Host, facts: &Facts, needs: &Needs) -> Result<Choice, Vec<Reason>> {
        admits(facts, &needs.pod)?;
        has_room(host, facts, needs)?;
        if needs.is_exclusive_taken {
            return Err(vec![Reason::Exclusive]);
        }
        let mut against = Vec::new();
        if !needs.bound.iter().all(|volume| host.reaches(&facts.node, volume)) {
            against.push(Reason::VolumeAffinity);
        }
        let choice = self.choose(host, facts, needs).map_err(|reason| against.push(reason)).unwrap_or_default();
        if needs.is_volume_gone {
            against.push(Reason::VolumeGone);
        }
        if !against.is_empty() {
            return Err(against);
        }
        if !needs.bound.iter().all(|volume| is_in_zone(volume, facts)) {
            return Err(vec![Reason::Zone]);
        }
        self.takes_volumes(host, needs, &choice).map_err(|reason| vec![reason])?;
        Ok(choice)
    }

    /// Drivers must be there, and must take as many volumes as there would be.
    fn takes_volumes(&self, host: &Host, needs: &Needs, choice: &Choice) -> Result<(), Reason> {
        let mut volumes = needs.volumes.clone();
        volumes.extend(choice.taken.iter().filter_map(|(volume, _)| Handle::of(volume)));
        let mut needed = needs.drivers.iter().chain(volumes.iter().map(|volume| &volume.driver));
        if let Some(missing) = needed.find(|driver| !host.drivers.contains_key(*driver)) {
            return Err(Reason::DriverMissing(missing.clone()));
        }
        let made = choice.provisioned.iter();
        volumes.extend(made.filter_map(|claim| Handle::to_be_made(claim, self.class_of(claim)?)));
        for (driver, limit) in host.drivers.iter().filter_map(|(driver, limit)| Some((driver, (*limit)?))) {
            let mine: HashSet<&str> = volumes.iter().filter(|v| v.driver == *driver).map(|v| v.id.as_str()).collect();
            if mine.is_empty() {
                continue;
            }
            let mut all: HashSet<&str> =
                host.load.volumes.get(driver).into_iter().flat_map(|v| v.keys().map(String::as_str)).collect();
            let attached = host.attached.values().filter(|(attacher, _)| attacher == driver);
            all.extend(attached.filter_map(|(_, volume)| self.handle_of(volume)));
            let new = mine.difference(&all).count();
            if new > 0 && all.len() + new > limit {
                return Err(Reason::VolumeCount);
            }
        }
        Ok(())
    }

    fn handle_of(&self, volume: &str) -> Option<&str> {
        self.volumes.get(volume)?.handle.as_deref()
    }

    fn choose(&self, host: &Host, facts: &Facts, needs: &Needs) -> Result<Choice, Reason> {
        let mut choice = Choice::default();
        for delayed in &needs.delayed {
            let is_here = delayed.selected.as_deref() == facts.node.metadata.name.as_deref();
            match &delayed.selected {
                Some(_) if !is_here => return Err(Reason::NoVolume),
                // A provisioner was asked already: it is not for us to take another volume, and for it to say what is left.
                Some(_) => self.can_be_made(host, facts, delayed)?,
                None => {
                    if let Some(volume) = self.existing(host, facts, delayed, &choice)? {
                        choice.taken.push((volume, delayed.claim.clone()));
                        continue;
                    }
                    self.can_be_made(host, facts, delayed)?;
                    self.has_storage(facts, delayed)?;
                }
            }
            choice.provisioned.push(delayed.claim.clone());
        }
        Ok(choice)
    }

    /// A volume set aside for the claim, or else the smallest free one that suits it here.
    fn existing(
        &self,
        host: &Host,
        facts: &Facts,
        delayed: &Delayed,
        chosen: &Choice,
    ) -> Result<Option<Arc<PersistentVolume>>, Reason> {
        let claim = &delayed.claim;
        if let Some(reserved) = delayed.reserved.iter().find(|v| is_usable(v, claim)) {
            if !host.reaches(&facts.node, reserved) {
                return Err(Reason::NoVolume);
            }
            return Ok(reserved.metadata.name.as_deref().and_then(|name| self.volume(name)));
        }
        let class = delayed.class.metadata.name.as_deref().unwrap_or_default();
        let is_taken =
            |v: &PersistentVolume| chosen.taken.iter().any(|(other, _)| other.metadata.name == v.metadata.name);
        Ok(self
            .free_volumes(class, facts.hostname(), delayed.bytes)
            .find(|v| !is_taken(v) && is_usable(v, claim) && is_available_for(v, claim) && host.reaches(&facts.node, v)))
    }

    fn can_be_made(&self, host: &Host, facts: &Facts, delayed: &Delayed) -> Result<(), Reason> {
        let class = &delayed.class;
        let provisioner = class.provisioner.as_str();
        if provisioner.is_empty() || provisioner == NO_PROVISIONER {
            return Err(Reason::NoVolume);
        }
        let allowed = class.allowed_topologies.as_deref().unwrap_or_default();
        if !topology_matches(allowed, facts.node.metadata.labels.as_ref()) {
            return Err(Reason::NoVolume);
        }
        // A provisioner without a CSIDriver may have nothing to do with nodes.
        let driver = driver_of(class);
        if self.drivers.contains_key(driver) && !host.drivers.contains_key(driver) {
            return Err(Reason::DriverMissing(driver.to_owned()));
        }
        Ok(())
    }

    /// Drivers that report what they have free must have enough where this node is.
    fn has_storage(&self, facts: &Facts, delayed: &Delayed) -> Result<(), Reason> {
        let Some(mut reports) = self.reports(facts, delayed) else { return Ok(()) };
        if delayed.bytes > 0 && !reports.any(|report| report.holds(delayed.bytes)) {
            return Err(Reason::NoStorage);
        }
        Ok(())
    }

    /// What the claim's driver says it has free where this node is; `None` for a driver that does not count.
    pub(super) fn reports<'w>(
        &'w self,
        facts: &'w Facts,
        delayed: &Delayed,
    ) -> Option<impl Iterator<Item = &'w Report> + use<'w>> {
        let driver = self.drivers.get(&delayed.class.provisioner);
        driver.filter(|driver| driver.spec.storage_capacity == Some(true))?;
        let class = delayed.class.metadata.name.as_deref().unwrap_or_default();
        let keys = facts.capacities.get(class).into_iter().flatten();
        Some(keys.filter_map(|key| self.capacities.get(key)))
    }
}

/// Taints, cordons, selectors and affinity: what depends on the Node and the pod's own words only.
fn admits(facts: &Facts, pod: &Pod) -> Result<(), Vec<Reason>> {
    let Some(spec) = &pod.spec else { return Ok(()) };
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    if facts.is_cordoned && !tolerates(tolerations, &cordon()) {
        return Err(vec![Reason::Cordoned]);
    }
    if untolerated(facts, tolerations, &["NoSchedule", "NoExecute"]).next().is_some() {
        return Err(vec![Reason::Taint]);
    }
    let selected = spec.node_selector.iter().flatten().all(|(key, value)| facts.label(key) == Some(value));
    let affinity = spec.affinity.as_ref().and_then(|a| a.node_affinity.as_ref());
    let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    if !selected || !required.is_none_or(|required| selector::node_matches(required, &facts.node)) {
        return Err(vec![Reason::Affinity]);
    }
    Ok(())
}

fn cordon() -> Taint {
    Taint { key: taint::UNSCHEDULABLE.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() }
}

pub(super) fn untolerated<'a>(
    facts: &'a Facts,
    tolerations: &'a [Toleration],
    effects: &'a [&str],
) -> impl Iterator<Item = &'a Taint> {
    let of_effect = facts.taints.iter().filter(|t| effects.contains(&t.effect.as_str()));
    of_effect.filter(|taint| !tolerates(tolerations, taint))
}

fn has_room(host: &Host, facts: &Facts, needs: &Needs) -> Result<(), Vec<Reason>> {
    let (load, demand) = (&host.load, &needs.demand);
    if demand.ports.iter().any(|port| load.ports.iter().any(|other| port.conflicts(other))) {
        return Err(vec![Reason::Ports]);
    }
    let offered = |resource: &str| facts.allocatable.get(resource).copied().unwrap_or(0);
    let mut short = Vec::new();
    if i64::try_from(load.pods.len()).unwrap_or(i64::MAX) >= offered("pods") {
        short.push(Reason::TooManyPods);
    }
    for (resource, amount) in demand.requests.iter().filter(|(_, amount)| **amount > 0) {
        let used = load.used.get(resource).copied().unwrap_or(0);
        if *amount > offered(resource) - used {
            short.push(Reason::Insufficient(resource.clone()));
        }
    }
    if !short.is_empty() {
        return Err(short);
    }
    if demand.disks.iter().any(|disk| load.disks.iter().any(|other| disk.conflicts(other))) {
        return Err(vec![Reason::Disk]);
    }
    Ok(())
}

/// Volumes say by label in which zone and region they are; nodes that say nothing of theirs take any.
fn is_in_zone(volume: &PersistentVolume, facts: &Facts) -> bool {
    const KEYS: [(&str, &str); 4] = [
        (label::ZONE, label::ZONE),
        (label::REGION, label::REGION),
        (label::ZONE_BETA, label::ZONE),
        (label::REGION_BETA, label::REGION),
    ];
    if KEYS.iter().all(|(key, _)| facts.label(key).is_none()) {
        return true;
    }
    KEYS.iter().all(|(key, newer)| {
        let Some(zones) = volume.metadata.labels.as_ref().and_then(|l| l.get(*key)) else { return true };
        let here = facts.label(key).or_else(|| facts.label(newer));
        here.is_some_and(|here| zones.split("__").any(|zone| zone == here))
    })
}
