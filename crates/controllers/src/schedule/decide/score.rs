//! Which of the nodes that take a pod is best. Pure.

use std::collections::BTreeMap;

use cleat_api::claim::{capacity, claim_class, requested_storage};
use cleat_api::selector::term_matches;

use super::World;
use super::fit::{Choice, untolerated};
use super::host::{Facts, Host};
use super::needs::Needs;
use super::world::Report;

/// The best and the worst score of one question.
const BEST: i64 = 100;
const TAINTS: i64 = 3;
const AFFINITY: i64 = 2;

/// A node that takes the pod.
pub(super) struct Candidate<'w> {
    pub(super) name: &'w str,
    pub(super) host: &'w Host,
    pub(super) facts: &'w Facts,
    pub(super) choice: Choice,
    /// A provisioner has just given this node back.
    pub(super) was_returned: bool,
}

impl World {
    /// Few unwanted taints, much wanted affinity, much room, fitting storage; then few pods, then the first by name.
    pub(super) fn best<'w>(&self, needs: &Needs, candidates: Vec<Candidate<'w>>) -> Option<Candidate<'w>> {
        let taints = candidates.iter().map(|c| unwanted_taints(c.facts, needs)).collect::<Vec<_>>();
        let wishes = candidates.iter().map(|c| wished(c.facts, needs)).collect::<Vec<_>>();
        let (most_taints, most_wishes) = (most(&taints), most(&wishes));
        let scored = candidates.into_iter().zip(taints.into_iter().zip(wishes)).map(|(candidate, (taints, wishes))| {
            let score = TAINTS * (BEST - BEST * taints / most_taints)
                + AFFINITY * BEST * wishes / most_wishes
                + room(candidate.host, candidate.facts, needs)
                + self.storage(&candidate, needs);
            (score, candidate)
        });
        let order =
            |(score, c): &(i64, Candidate<'w>)| (!c.was_returned, *score, std::cmp::Reverse(c.host.load.pods.len()));
        let best = scored.reduce(|best, next| if order(&next) > order(&best) { next } else { best });
        best.map(|(_, candidate)| candidate)
    }

    /// Existing volumes: the less of them is wasted, the better. New ones: the more is left where they are made. Class by class,
    /// and then the mean.
    fn storage(&self, candidate: &Candidate<'_>, needs: &Needs) -> i64 {
        let choice = &candidate.choice;
        let mut classes: BTreeMap<&str, (i64, i64)> = BTreeMap::new();
        for (volume, claim) in &choice.taken {
            let (asked, offered) = classes.entry(claim_class(claim).unwrap_or_default()).or_default();
            *asked += requested_storage(claim).map_or(0, |q| q.to_bytes());
            *offered += capacity(volume).map_or(0, |q| q.to_bytes());
        }
        if !choice.taken.is_empty() {
            return mean(classes.values().map(|(asked, offered)| used(*asked, *offered)));
        }
        for delayed in &needs.delayed {
            let left =
                self.reports(candidate.facts, delayed).and_then(|reports| reports.filter_map(Report::left).max());
            let (Some(left), Some(class)) = (left, delayed.class.metadata.name.as_deref()) else { continue };
            let (asked, offered) = classes.entry(class).or_default();
            *asked += delayed.bytes;
            *offered = left;
        }
        mean(classes.values().map(|(asked, offered)| BEST - used(*asked, *offered)))
    }
}

/// How much of what is offered would be used.
fn used(asked: i64, offered: i64) -> i64 {
    if offered <= 0 || asked > offered { BEST } else { BEST.saturating_mul(asked) / offered }
}

fn mean(scores: impl Iterator<Item = i64>) -> i64 {
    let (sum, count) = scores.fold((0, 0), |(sum, count), score| (sum + score, count + 1));
    // Rounded.
    if count == 0 { 0 } else { (2 * sum + count) / (2 * count) }
}

fn most(values: &[i64]) -> i64 {
    values.iter().copied().max().unwrap_or(0).max(1)
}

fn unwanted_taints(facts: &Facts, needs: &Needs) -> i64 {
    let tolerations = needs.pod.spec.as_ref().and_then(|s| s.tolerations.as_deref()).unwrap_or_default();
    i64::try_from(untolerated(facts, tolerations, &["PreferNoSchedule"]).count()).unwrap_or(i64::MAX)
}

fn wished(facts: &Facts, needs: &Needs) -> i64 {
    let affinity = needs.pod.spec.as_ref().and_then(|s| s.affinity.as_ref()?.node_affinity.as_ref());
    let wishes = affinity.and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref());
    let met = wishes.into_iter().flatten().filter(|wish| term_matches(&wish.preference, &facts.node));
    met.map(|wish| i64::from(wish.weight)).sum()
}

/// How much of the node's cpu and memory would be left.
fn room(host: &Host, facts: &Facts, needs: &Needs) -> i64 {
    let offered = |resource: &str| facts.allocatable.get(resource).copied().unwrap_or(0);
    let left = |offered: i64, used: i64| {
        if offered <= 0 { 0 } else { (offered - used).max(0).saturating_mul(BEST) / offered }
    };
    let (load, usual) = (host.load.usual, needs.demand.usual);
    (left(offered("cpu"), load.0 + usual.0) + left(offered("memory"), load.1 + usual.1)) / 2
}
