//! Decides on the conditions and taints of a node, and on the pods of a node that is not ready or missing. Pure: the
//! caller supplies the time.

use std::sync::Arc;

use cleat_api::condition::{node_is_ready, node_ready, pod_condition};
use cleat_api::key::Meta as _;
use cleat_api::toleration::tolerates;
use cleat_api::well_known::taint;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// The time after its last sign of life at which a node becomes Unknown.
pub const NODE_MONITOR_GRACE_PERIOD: SignedDuration = SignedDuration::from_secs(50);
/// The time that a Node must be missing before its pods are deleted. A running node agent creates the Node again within
/// it.
pub const MISSING_NODE_GRACE_PERIOD: SignedDuration = SignedDuration::from_secs(40);

const NO_SCHEDULE: &str = "NoSchedule";
const NO_EXECUTE: &str = "NoExecute";
/// The conditions that the node agent reports. They become Unknown when it stops.
const AGENT_CONDITIONS: [&str; 4] = ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"];

pub struct LifecycleNodeSnapshot {
    pub node: Arc<Node>,
    pub lease_renewed_at: Option<Timestamp>,
    /// The start of this process. Silence before it does not count: the process did not receive the node's reports
    /// then.
    pub watched_since: Timestamp,
    pub now: Timestamp,
}

/// The writes that a node needs. Conditions are written before taints.
#[derive(Debug, Default, PartialEq)]
pub struct NodePlan {
    /// All conditions of the node, if some must become Unknown.
    pub conditions: Option<Vec<NodeCondition>>,
    /// All taints of the node, if they must change.
    pub taints: Option<Vec<Taint>>,
    /// When the node becomes Unknown unless it gives a sign of life; `None` if it is silent already.
    pub recheck_at: Option<Timestamp>,
}

pub fn node(snapshot: &LifecycleNodeSnapshot) -> NodePlan {
    let ready = node_ready(&snapshot.node);
    let deadline = last_sign_of_life(snapshot).checked_add(NODE_MONITOR_GRACE_PERIOD).unwrap_or(Timestamp::MAX);
    let is_silent = snapshot.now >= deadline;
    let conditions = (is_silent && ready != Some("Unknown")).then(|| unknown_conditions(&snapshot.node, snapshot.now));
    let ready = if is_silent { Some("Unknown") } else { ready };
    NodePlan {
        conditions,
        taints: changed_taints(&snapshot.node, ready, snapshot.now),
        recheck_at: (!is_silent).then_some(deadline),
    }
}

/// Returns the latest of Lease renewal, heartbeat, creation and start of the watch. A node renews its Lease often and
/// its status rarely; a new node has done neither yet.
fn last_sign_of_life(snapshot: &LifecycleNodeSnapshot) -> Timestamp {
    let conditions = snapshot.node.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let heartbeat =
        conditions.filter(|c| c.type_ == "Ready").filter_map(|c| Some(c.last_heartbeat_time.as_ref()?.0)).max();
    let created = snapshot.node.metadata.creation_timestamp.as_ref().map(|t| t.0);
    [snapshot.lease_renewed_at, heartbeat, created].into_iter().flatten().fold(snapshot.watched_since, Timestamp::max)
}

/// Returns the conditions of the node, with those that its agent reports set to Unknown.
fn unknown_conditions(node: &Node, now: Timestamp) -> Vec<NodeCondition> {
    let mut conditions: Vec<_> = node.status.iter().flat_map(|s| s.conditions.clone().unwrap_or_default()).collect();
    for kind in AGENT_CONDITIONS {
        let (reason, message) = match conditions.iter().any(|c| c.type_ == kind) {
            true => ("NodeStatusUnknown", "Kubelet stopped posting node status."),
            false => ("NodeStatusNeverUpdated", "Kubelet never posted node status."),
        };
        let old = conditions.iter().position(|c| c.type_ == kind).map(|at| conditions.remove(at));
        conditions.push(NodeCondition {
            type_: kind.to_owned(),
            status: "Unknown".to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            last_heartbeat_time: old.and_then(|c| c.last_heartbeat_time),
            last_transition_time: Some(Time(now)),
        });
    }
    conditions
}

/// Returns all taints of the node, if the taints for readiness and cordon must change. Other taints stay.
fn changed_taints(node: &Node, ready: Option<&str>, now: Timestamp) -> Option<Vec<Taint>> {
    let spec = node.spec.as_ref();
    let current = spec.and_then(|s| s.taints.clone()).unwrap_or_default();
    let mut wanted = Vec::new();
    match ready {
        Some("True") => {}
        // The API server creates a node with this taint. It stays until the first report.
        None => wanted.push((taint::NOT_READY, NO_SCHEDULE)),
        Some("Unknown") => wanted.extend([(taint::UNREACHABLE, NO_SCHEDULE), (taint::UNREACHABLE, NO_EXECUTE)]),
        Some(_) => wanted.extend([(taint::NOT_READY, NO_SCHEDULE), (taint::NOT_READY, NO_EXECUTE)]),
    }
    if spec.and_then(|s| s.unschedulable).unwrap_or(false) {
        wanted.push((taint::UNSCHEDULABLE, NO_SCHEDULE));
    }
    let managed = [taint::UNREACHABLE, taint::NOT_READY, taint::UNSCHEDULABLE];
    let is_wanted = |t: &Taint| wanted.iter().any(|(key, effect)| t.key == *key && t.effect == *effect);
    let mut next: Vec<Taint> =
        current.iter().filter(|t| !managed.contains(&t.key.as_str()) || is_wanted(t)).cloned().collect();
    for (key, effect) in wanted {
        if !next.iter().any(|t| t.key == key && t.effect == effect) {
            next.push(Taint {
                key: key.to_owned(),
                effect: effect.to_owned(),
                time_added: Some(Time(now)),
                ..Taint::default()
            });
        }
    }
    (next != current).then_some(next)
}

pub struct LifecyclePodSnapshot {
    pub pod: Arc<Pod>,
    /// The pod's node; `None` if it does not exist.
    pub node: Option<Arc<Node>>,
    /// When the caller first observed that the Node is missing, or that it has its present taints. Used for taints
    /// without `timeAdded`.
    pub node_changed_at: Timestamp,
    pub now: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifecyclePodDecision {
    Keep,
    /// Decide again at this time.
    RecheckAt(Timestamp),
    /// The pod was ready when its node stopped being ready.
    MarkNotReady,
    /// The pod does not tolerate a `NoExecute` taint, or no longer.
    Evict,
    /// The node does not exist, so no agent will report that the pod has terminated. The caller must confirm it with a
    /// live read of the Node before it deletes the pod.
    DeleteOrphaned,
    /// The pod is being deleted, and the taint out-of-service says that the machine is off: no agent will report that
    /// the pod has terminated.
    DeleteOutOfService,
}

pub fn pod(snapshot: &LifecyclePodSnapshot) -> LifecyclePodDecision {
    let Some(node) = &snapshot.node else {
        let deadline = snapshot.node_changed_at.checked_add(MISSING_NODE_GRACE_PERIOD).unwrap_or(Timestamp::MAX);
        return match snapshot.now >= deadline {
            true => LifecyclePodDecision::DeleteOrphaned,
            false => LifecyclePodDecision::RecheckAt(deadline),
        };
    };
    if was_ready_before_node_was_not(&snapshot.pod, node) {
        return LifecyclePodDecision::MarkNotReady;
    }
    let taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
    if snapshot.pod.metadata.is_deleting() {
        let is_out_of_service = taints.clone().any(|t| t.key == taint::OUT_OF_SERVICE) && !node_is_ready(node);
        return match is_out_of_service {
            true => LifecyclePodDecision::DeleteOutOfService,
            false => LifecyclePodDecision::Keep,
        };
    }
    let tolerations = snapshot.pod.spec.as_ref().and_then(|s| s.tolerations.as_deref()).unwrap_or_default();
    let evictions = taints
        .filter(|t| t.effect == NO_EXECUTE)
        .filter_map(|t| eviction_time(t, tolerations, snapshot.node_changed_at));
    match evictions.min() {
        None => LifecyclePodDecision::Keep,
        Some(at) if at <= snapshot.now => LifecyclePodDecision::Evict,
        Some(at) => LifecyclePodDecision::RecheckAt(at),
    }
}

/// Returns true if the pod is ready and became so before its node stopped being ready. A later report comes from a node
/// agent that is still running, and counts.
fn was_ready_before_node_was_not(pod: &Pod, node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let Some(unready) = conditions.into_iter().find(|c| c.type_ == "Ready" && c.status != "True") else { return false };
    let Some(ready) = pod_condition(pod, "Ready").filter(|c| c.status == "True") else { return false };
    match (&ready.last_transition_time, &unready.last_transition_time) {
        (Some(ready), Some(unready)) => ready.0 <= unready.0,
        (_, _) => true,
    }
}

/// Returns when the pod must be evicted because of this taint; `None` if it tolerates the taint forever. A taint
/// without `timeAdded` counts from `observed_at`.
fn eviction_time(taint: &Taint, tolerations: &[Toleration], observed_at: Timestamp) -> Option<Timestamp> {
    let since = taint.time_added.as_ref().map_or(observed_at, |time| time.0);
    let Some(toleration) = tolerations.iter().find(|t| tolerates(std::slice::from_ref(*t), taint)) else {
        return Some(since);
    };
    let seconds = toleration.toleration_seconds?;
    Some(since.checked_add(SignedDuration::from_secs(seconds.max(0))).unwrap_or(Timestamp::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;
    use serde_json::{Value, json};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// An old node with this status of the condition Ready and a heartbeat at second 1000.
    fn node_with_ready(ready: &str) -> Node {
        let mut node = build::node("n1");
        node.metadata.creation_timestamp = Some(build::time(0));
        let condition = json!([{"type": "Ready", "status": ready, "lastHeartbeatTime": "1970-01-01T00:16:40Z"}]);
        node.status.as_mut().unwrap().conditions = Some(serde_json::from_value(condition).unwrap());
        node
    }

    fn tainted(mut node: Node, taints: &Value) -> Node {
        node.spec.get_or_insert_default().taints = Some(serde_json::from_value(taints.clone()).unwrap());
        node
    }

    fn keys(taints: Option<&Vec<Taint>>) -> Vec<String> {
        taints.into_iter().flatten().map(|t| format!("{}:{}", t.key, t.effect)).collect()
    }

    #[test]
    fn a_silent_node_is_unknown_after_the_grace_period() {
        let never = {
            let mut node = build::node("n1");
            node.status = None;
            node.metadata.creation_timestamp = Some(build::time(1000));
            node
        };
        for (case, node_object, renewed, watched_since, now, silent, recheck_at) in [
            ("a heartbeat just now", node_with_ready("True"), None, 0, 1010, false, Some(1050)),
            ("a renewed lease", node_with_ready("True"), Some(1030), 0, 1060, false, Some(1080)),
            ("no heartbeat and no renewed lease for too long", node_with_ready("True"), Some(990), 0, 1050, true, None),
            ("the controller has just started", node_with_ready("True"), None, 1040, 1060, false, Some(1090)),
            ("already Unknown", node_with_ready("Unknown"), None, 0, 2000, false, None),
            ("new, before its first report", never.clone(), None, 0, 1010, false, Some(1050)),
            ("without a report since its creation", never, None, 0, 1050, true, None),
        ] {
            let snapshot = LifecycleNodeSnapshot {
                node: Arc::new(node_object),
                lease_renewed_at: renewed.map(at),
                watched_since: at(watched_since),
                now: at(now),
            };
            let plan = node(&snapshot);
            assert_eq!(plan.conditions.is_some(), silent, "{case}");
            assert_eq!(plan.recheck_at, recheck_at.map(at), "{case}");
            let unknown = plan.conditions.iter().flatten().filter(|c| c.status == "Unknown").count();
            assert_eq!(unknown, if silent { 4 } else { 0 }, "{case}");
        }
    }

    #[test]
    fn readiness_and_cordons_become_taints() {
        let other = json!([{"key": "gpu", "effect": "NoSchedule"}]);
        let unreachable = json!([{"key": taint::UNREACHABLE, "effect": "NoExecute"},
            {"key": taint::UNREACHABLE, "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoSchedule"}]);
        let both = |key: &str| vec![format!("{key}:NoSchedule"), format!("{key}:NoExecute")];
        let cordoned = |mut node: Node| {
            node.spec.get_or_insert_default().unschedulable = Some(true);
            node
        };
        let gpu = "gpu:NoSchedule".to_owned();
        let fresh = {
            let mut node = build::node("n1");
            node.status = None;
            tainted(node, &json!([{"key": taint::NOT_READY, "effect": "NoSchedule"}]))
        };
        let created =
            json!([{"key": taint::NOT_READY, "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoSchedule"}]);
        for (case, object, now, want) in [
            ("new", fresh, 1001, None),
            ("ready for the first time", tainted(node_with_ready("True"), &created), 1001, Some(vec![gpu.clone()])),
            ("ready", node_with_ready("True"), 1001, None),
            ("ready, with a taint of a user", tainted(node_with_ready("True"), &other), 1001, None),
            ("not ready", node_with_ready("False"), 1001, Some(both(taint::NOT_READY))),
            ("silent", node_with_ready("True"), 2000, Some(both(taint::UNREACHABLE))),
            ("silent, with the taints already", tainted(node_with_ready("Unknown"), &unreachable), 2000, None),
            ("ready again", tainted(node_with_ready("True"), &unreachable), 1001, Some(vec![gpu.clone()])),
            (
                "reporting again, not ready",
                tainted(node_with_ready("False"), &unreachable),
                1001,
                Some([vec![gpu], both(taint::NOT_READY)].concat()),
            ),
            (
                "cordoned",
                cordoned(node_with_ready("True")),
                1001,
                Some(vec![format!("{}:NoSchedule", taint::UNSCHEDULABLE)]),
            ),
            (
                "uncordoned",
                tainted(node_with_ready("True"), &json!([{"key": taint::UNSCHEDULABLE, "effect": "NoSchedule"}])),
                1001,
                Some(vec![]),
            ),
        ] {
            let snapshot = LifecycleNodeSnapshot {
                node: Arc::new(object),
                lease_renewed_at: None,
                watched_since: at(0),
                now: at(now),
            };
            let plan = node(&snapshot);
            assert_eq!(plan.taints.as_ref().map(|t| keys(Some(t))), want, "{case}");
            let added = plan.taints.iter().flatten().filter(|t| t.key == taint::NOT_READY);
            assert!(added.map(|t| t.time_added.clone()).all(|time| time == Some(Time(at(now)))), "{case}");
        }
    }

    #[test]
    fn pods_are_evicted_when_they_no_longer_tolerate_a_taint() {
        let since = "1970-01-01T00:16:40Z";
        let unreachable = json!([{"key": taint::UNREACHABLE, "effect": "NoExecute", "timeAdded": since}]);
        let without_time = json!([{"key": "x", "effect": "NoExecute"}]);
        let two = json!([{"key": taint::UNREACHABLE, "effect": "NoExecute", "timeAdded": since},
            {"key": "x", "effect": "NoExecute", "timeAdded": since}]);
        let out_of_service = json!([{"key": taint::OUT_OF_SERVICE, "effect": "NoExecute", "timeAdded": since}]);
        let soft = json!([{"key": "x", "effect": "NoSchedule"}]);
        let for_a_while = json!([{"key": taint::UNREACHABLE, "operator": "Exists", "tolerationSeconds": 300}]);
        let forever = json!([{"operator": "Exists"}]);
        let deletion_time = |on: bool| if on { json!("1970-01-01T00:00:00Z") } else { Value::Null };
        use LifecyclePodDecision::{DeleteOrphaned, DeleteOutOfService, Evict, Keep, MarkNotReady, RecheckAt};
        for (case, ready, taints, tolerations, is_deleting, now, want) in [
            ("no taint", "True", json!([]), json!([]), false, 2000, Keep),
            ("a taint for new pods only", "True", soft, json!([]), false, 2000, Keep),
            ("not tolerated", "Unknown", unreachable.clone(), json!([]), false, 1001, Evict),
            (
                "tolerated for a while",
                "Unknown",
                unreachable.clone(),
                for_a_while.clone(),
                false,
                1001,
                RecheckAt(at(1300)),
            ),
            ("the toleration has expired", "Unknown", unreachable.clone(), for_a_while.clone(), false, 1300, Evict),
            ("tolerated forever", "Unknown", unreachable.clone(), forever, false, 9000, Keep),
            ("one of two is not tolerated", "Unknown", two, for_a_while, false, 1001, Evict),
            (
                "a taint without timeAdded",
                "True",
                without_time,
                json!([{"key": "x", "operator": "Exists", "tolerationSeconds": 10}]),
                false,
                1500,
                RecheckAt(at(1510)),
            ),
            ("being deleted already", "Unknown", unreachable, json!([]), true, 2000, Keep),
            ("out of service", "Unknown", out_of_service.clone(), json!([]), false, 2000, Evict),
            (
                "being deleted on an out-of-service node",
                "Unknown",
                out_of_service.clone(),
                json!([]),
                true,
                2000,
                DeleteOutOfService,
            ),
            ("being deleted on a ready node", "True", out_of_service, json!([]), true, 2000, Keep),
        ] {
            let mut object = build::pod("ns", "p", "n1", &[]);
            object.spec.as_mut().unwrap().tolerations = Some(serde_json::from_value(tolerations).unwrap());
            object.metadata.deletion_timestamp = serde_json::from_value(deletion_time(is_deleting)).unwrap();
            let node = Some(Arc::new(tainted(node_with_ready(ready), &taints)));
            let snapshot =
                LifecyclePodSnapshot { pod: Arc::new(object), node, node_changed_at: at(1500), now: at(now) };
            assert_eq!(pod(&snapshot), want, "{case}");
        }
        let ready =
            |status: &str, since: Value| json!([{"type": "Ready", "status": status, "lastTransitionTime": since}]);
        let (before, after) = (json!("1970-01-01T00:00:10Z"), json!("1970-01-01T00:00:30Z"));
        let middle = json!("1970-01-01T00:00:20Z");
        for (case, node, pod_conditions, want) in [
            ("ready on a ready node", "True", ready("True", before.clone()), Keep),
            ("ready before the node became Unknown", "Unknown", ready("True", before.clone()), MarkNotReady),
            ("ready before the node was not ready", "False", ready("True", before.clone()), MarkNotReady),
            ("ready since the same second", "False", ready("True", middle.clone()), MarkNotReady),
            ("ready, without a transition time", "False", ready("True", Value::Null), MarkNotReady),
            ("ready after the node was not ready", "False", ready("True", after), Keep),
            ("not ready anyway", "Unknown", ready("False", before), Keep),
            ("without the condition", "Unknown", json!([]), Keep),
        ] {
            let mut object = build::pod("ns", "p", "n1", &[]);
            object.status.get_or_insert_default().conditions = Some(serde_json::from_value(pod_conditions).unwrap());
            let mut node = node_with_ready(node);
            let conditions = node.status.as_mut().unwrap().conditions.as_mut().unwrap();
            conditions[0].last_transition_time = Some(serde_json::from_value(middle.clone()).unwrap());
            let (pod_object, node) = (Arc::new(object), Some(Arc::new(node)));
            let snapshot = LifecyclePodSnapshot { pod: pod_object, node, node_changed_at: at(1500), now: at(1500) };
            assert_eq!(pod(&snapshot), want, "{case}");
        }
        for (case, now, want) in
            [("missing for a moment", 1539, RecheckAt(at(1540))), ("missing", 1540, DeleteOrphaned)]
        {
            let object = Arc::new(build::pod("ns", "p", "n1", &[]));
            let snapshot = LifecyclePodSnapshot { pod: object, node: None, node_changed_at: at(1500), now: at(now) };
            assert_eq!(pod(&snapshot), want, "{case}");
        }
    }
}
