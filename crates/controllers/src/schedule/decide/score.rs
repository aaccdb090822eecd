//! Selects the best of the nodes that can run a pod. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use cleat_api::claim::{capacity, claim_class, requested_storage};
use cleat_api::selector::term_matches;

use super::SchedulerState;
use super::fit::{VolumePlan, untolerated_taints};
use super::node_info::{NodeInfo, ParsedNode};
use super::requirements::PodRequirements;
use super::storage::CapacityInfo;

/// Each criterion gives between 0 and this many points, times its weight.
const MAX_SCORE: i64 = 100;
const TAINT_WEIGHT: i64 = 3;
const AFFINITY_WEIGHT: i64 = 2;

/// A node that can run the pod.
pub(super) struct Candidate<'s> {
    pub(super) name: &'s str,
    pub(super) info: &'s NodeInfo,
    pub(super) node: &'s ParsedNode,
    pub(super) plan: VolumePlan,
    /// A provisioner has rejected this node for a claim of the pod.
    pub(super) was_returned: bool,
}

impl SchedulerState {
    /// The candidate with the highest score, which prefers few untolerated `PreferNoSchedule` taints, preferred node
    /// affinity, free resources and suitable storage. Nodes that a provisioner returned come last. Ties go to the node
    /// with fewer pods, then to the first in the order of `candidates`.
    pub(super) fn best_candidate<'s>(
        &self,
        requirements: &PodRequirements,
        candidates: Vec<Candidate<'s>>,
    ) -> Option<Candidate<'s>> {
        let taints = candidates.iter().map(|c| soft_taints(c.node, requirements)).collect::<Vec<_>>();
        let weights = candidates.iter().map(|c| preferred_weight(c.node, requirements)).collect::<Vec<_>>();
        let (max_taints, max_weight) = (max_or_one(&taints), max_or_one(&weights));
        let scored =
            candidates.into_iter().zip(taints.into_iter().zip(weights)).map(|(candidate, (taints, weight))| {
                let score = TAINT_WEIGHT * (MAX_SCORE - MAX_SCORE * taints / max_taints)
                    + AFFINITY_WEIGHT * MAX_SCORE * weight / max_weight
                    + free_resources_score(candidate.info, candidate.node, requirements)
                    + self.storage_score(&candidate, requirements);
                (score, candidate)
            });
        let order = |(score, c): &(i64, Candidate<'s>)| (!c.was_returned, *score, Reverse(c.info.usage.pods.len()));
        let best = scored.reduce(|best, next| if order(&next) > order(&best) { next } else { best });
        best.map(|(_, candidate)| candidate)
    }

    /// The mean over the classes of the pod's delayed claims. Existing volumes score higher the less of them stays
    /// unused; volumes to be provisioned score higher the more storage is left. With any existing volume only those
    /// count.
    fn storage_score(&self, candidate: &Candidate<'_>, requirements: &PodRequirements) -> i64 {
        let matched = &candidate.plan.matched;
        let mut classes: BTreeMap<&str, (i64, i64)> = BTreeMap::new();
        for (volume, claim) in matched {
            let (request, available) = classes.entry(claim_class(claim).unwrap_or_default()).or_default();
            *request += requested_storage(claim).map_or(0, |q| q.to_bytes());
            *available += capacity(volume).map_or(0, |q| q.to_bytes());
        }
        if !matched.is_empty() {
            return mean(classes.values().map(|(request, available)| utilization(*request, *available)));
        }
        for delayed in &requirements.delayed_claims {
            let most_available = self
                .capacities_for(candidate.node, delayed)
                .and_then(|capacities| capacities.filter_map(CapacityInfo::available_bytes).max());
            let (Some(most_available), Some(class)) = (most_available, delayed.class.metadata.name.as_deref()) else {
                continue;
            };
            let (request, available) = classes.entry(class).or_default();
            *request += delayed.requested_bytes;
            *available = most_available;
        }
        mean(classes.values().map(|(request, available)| MAX_SCORE - utilization(*request, *available)))
    }
}

/// The part of `available` that `request` uses, from 0 to [`MAX_SCORE`].
fn utilization(request: i64, available: i64) -> i64 {
    if available <= 0 || request > available { MAX_SCORE } else { MAX_SCORE.saturating_mul(request) / available }
}

/// Rounded to the nearest integer; 0 without scores.
fn mean(scores: impl Iterator<Item = i64>) -> i64 {
    let (sum, count) = scores.fold((0, 0), |(sum, count), score| (sum + score, count + 1));
    if count == 0 { 0 } else { (2 * sum + count) / (2 * count) }
}

/// A divisor: at least 1.
fn max_or_one(values: &[i64]) -> i64 {
    values.iter().copied().max().unwrap_or(0).max(1)
}

fn soft_taints(node: &ParsedNode, requirements: &PodRequirements) -> i64 {
    let tolerations = requirements.pod.spec.as_ref().and_then(|s| s.tolerations.as_deref()).unwrap_or_default();
    i64::try_from(untolerated_taints(node, tolerations, &["PreferNoSchedule"]).count()).unwrap_or(i64::MAX)
}

/// The sum of the weights of the preferred node affinity terms that match.
fn preferred_weight(node: &ParsedNode, requirements: &PodRequirements) -> i64 {
    let affinity = requirements.pod.spec.as_ref().and_then(|s| s.affinity.as_ref()?.node_affinity.as_ref());
    let preferred = affinity.and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref());
    let matching = preferred.into_iter().flatten().filter(|term| term_matches(&term.preference, &node.object));
    matching.map(|term| i64::from(term.weight)).sum()
}

/// The mean of the free parts of the node's cpu and memory with the pod on it.
fn free_resources_score(info: &NodeInfo, node: &ParsedNode, requirements: &PodRequirements) -> i64 {
    let allocatable = |resource: &str| node.allocatable.get(resource).copied().unwrap_or(0);
    let free = |allocatable: i64, used: i64| {
        if allocatable <= 0 { 0 } else { (allocatable - used).max(0).saturating_mul(MAX_SCORE) / allocatable }
    };
    let (node_cpu, node_memory) = info.usage.nonzero_requests;
    let (pod_cpu, pod_memory) = requirements.resources.nonzero_requests;
    (free(allocatable("cpu"), node_cpu + pod_cpu) + free(allocatable("memory"), node_memory + pod_memory)) / 2
}
