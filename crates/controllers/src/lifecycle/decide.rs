//! What a node's silence means for the node, and what that means for its pods. Pure: time is given.

use std::sync::Arc;

use cleat_api::condition::{node_is_ready, node_ready, pod_condition};
use cleat_api::key::Meta as _;
use cleat_api::well_known::taint;
use cleat_api::toleration::tolerates;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// How long a node may be silent before nothing is known about it.
pub const GRACE: SignedDuration = SignedDuration::from_secs(50);
/// How long a Node may be missing before its pods are taken for lost: an agent that lives brings it back.
pub const QUARANTINE: SignedDuration = SignedDuration::from_secs(40);

const NO_SCHEDULE: &str = "NoSchedule";
const NO_EXECUTE: &str = "NoExecute";
/// What a node reports about itself, and cannot while it is silent.
const REPORTED: [&str; 4] = ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"];

pub struct NodeSeen {
    pub node: Arc<Node>,
    /// When the node's Lease was last renewed.
    pub renewed: Option<Timestamp>,
    /// Since when we watch: an earlier silence may have been ours.
    pub since: Timestamp,
    pub now: Timestamp,
}

#[derive(Debug, Default, PartialEq)]
pub struct NodePlan {
    /// The node's conditions, now that it is silent.
    pub conditions: Option<Vec<NodeCondition>>,
    /// The node's taints as they should be.
    pub taints: Option<Vec<Taint>>,
    /// When silence would begin to mean something.
    pub look_at: Option<Timestamp>,
}

pub fn node(seen: &NodeSeen) -> NodePlan {
    let ready = node_ready(&seen.node);
    let end = last_sign(seen).checked_add(GRACE).unwrap_or(Timestamp::MAX);
    let is_silent = seen.now >= end;
    let conditions = (is_silent && ready != Some("Unknown")).then(|| unknown(&seen.node, seen.now));
    let ready = if is_silent { Some("Unknown") } else { ready };
    NodePlan { conditions, taints: changed_taints(&seen.node, ready, seen.now), look_at: (!is_silent).then_some(end) }
}

/// The Lease is renewed often, the status seldom; a new node has some time to begin.
fn last_sign(seen: &NodeSeen) -> Timestamp {
    let conditions = seen.node.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let beat = conditions.filter(|c| c.type_ == "Ready").filter_map(|c| Some(c.last_heartbeat_time.as_ref()?.0)).max();
    let created = seen.node.metadata.creation_timestamp.as_ref().map(|t| t.0);
    [seen.renewed, beat, created].into_iter().flatten().fold(seen.since, Timestamp::max)
}

fn unknown(node: &Node, now: Timestamp) -> Vec<NodeCondition> {
    let mut conditions: Vec<_> = node.status.iter().flat_map(|s| s.conditions.clone().unwrap_or_default()).collect();
    for kind in REPORTED {
        let (reason, message) = match conditions.iter().any(|c| c.type_ == kind) {
            true => ("NodeStatusUnknown", "Kubelet stopped posting node status."),
            false => ("NodeStatusNeverUpdated", "Kubelet never posted node status."),
        };
        let before = conditions.iter().position(|c| c.type_ == kind).map(|at| conditions.remove(at));
        conditions.push(NodeCondition {
            type_: kind.to_owned(),
            status: "Unknown".to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            last_heartbeat_time: before.and_then(|c| c.last_heartbeat_time),
            last_transition_time: Some(Time(now)),
        });
    }
    conditions
}

/// Readiness and cordons as taints; everybody else's taints stay.
fn changed_taints(node: &Node, ready: Option<&str>, now: Timestamp) -> Option<Vec<Taint>> {
    let spec = node.spec.as_ref();
    let has = spec.and_then(|s| s.taints.clone()).unwrap_or_default();
    let mut wanted = Vec::new();
    match ready {
        Some("True") => {}
        // As it was created.
        None => wanted.push((taint::NOT_READY, NO_SCHEDULE)),
        Some("Unknown") => wanted.extend([(taint::UNREACHABLE, NO_SCHEDULE), (taint::UNREACHABLE, NO_EXECUTE)]),
        Some(_) => wanted.extend([(taint::NOT_READY, NO_SCHEDULE), (taint::NOT_READY, NO_EXECUTE)]),
    }
    if spec.and_then(|s| s.unschedulable).unwrap_or(false) {
        wanted.push((taint::UNSCHEDULABLE, NO_SCHEDULE));
    }
    let ours = [taint::UNREACHABLE, taint::NOT_READY, taint::UNSCHEDULABLE];
    let is_wanted = |t: &Taint| wanted.iter().any(|(key, effect)| t.key == *key && t.effect == *effect);
    let mut next: Vec<Taint> =
        has.iter().filter(|t| !ours.contains(&t.key.as_str()) || is_wanted(t)).cloned().collect();
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
    (next != has).then_some(next)
}

pub struct PodSeen {
    pub pod: Arc<Pod>,
    pub node: Option<Arc<Node>>,
    /// When we first saw that the Node is missing, or has a taint that does not say since when.
    pub since: Timestamp,
    pub now: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodDecision {
    Keep,
    /// Something may have to be done then.
    LookAt(Timestamp),
    /// It was ready before its node was not: nobody may rely on it any more.
    MarkNotReady,
    /// The node's taints are not tolerated, or not any longer.
    Evict,
    /// The node is gone: nobody will ever report the pod's end. Only if a live look confirms it.
    Collect,
    /// An administrator says that the machine is off: nobody will report the end of a pod that is being deleted.
    Finish,
}

pub fn pod(seen: &PodSeen) -> PodDecision {
    let Some(node) = &seen.node else {
        let end = seen.since.checked_add(QUARANTINE).unwrap_or(Timestamp::MAX);
        return if seen.now >= end { PodDecision::Collect } else { PodDecision::LookAt(end) };
    };
    if was_ready_before(&seen.pod, node) {
        return PodDecision::MarkNotReady;
    }
    let taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
    if seen.pod.metadata.is_deleting() {
        let is_off = taints.clone().any(|t| t.key == taint::OUT_OF_SERVICE) && !node_is_ready(node);
        return if is_off { PodDecision::Finish } else { PodDecision::Keep };
    }
    let tolerations = seen.pod.spec.as_ref().and_then(|s| s.tolerations.as_deref()).unwrap_or_default();
    let ends = taints.filter(|t| t.effect == NO_EXECUTE).filter_map(|t| leaves_at(t, tolerations, seen.since));
    match ends.min() {
        None => PodDecision::Keep,
        Some(end) if end <= seen.now => PodDecision::Evict,
        Some(end) => PodDecision::LookAt(end),
    }
}

/// The pod has been ready since before its node ceased to be. What the node's agent said of the pod after that counts: it lives.
fn was_ready_before(pod: &Pod, node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let Some(unready) = conditions.into_iter().find(|c| c.type_ == "Ready" && c.status != "True") else { return false };
    let Some(ready) = pod_condition(pod, "Ready").filter(|c| c.status == "True") else { return false };
    match (&ready.last_transition_time, &unready.last_transition_time) {
        (Some(ready), Some(unready)) => ready.0 <= unready.0,
        (_, _) => true,
    }
}

/// When the pod must leave because of this taint; `None` is never.
fn leaves_at(taint: &Taint, tolerations: &[Toleration], seen: Timestamp) -> Option<Timestamp> {
    let since = taint.time_added.as_ref().map_or(seen, |time| time.0);
    let Some(tolerated) = tolerations.iter().find(|t| tolerates(std::slice::from_ref(*t), taint)) else {
        return Some(since);
    };
    let seconds = tolerated.toleration_seconds?;
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

    /// A node made long ago that says this about Ready, with a heartbeat at second 1000.
    fn heard(ready: &str) -> Node {
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
    fn a_silent_node_is_unknown_after_its_grace() {
        let never = {
            let mut node = build::node("n1");
            node.status = None;
            node.metadata.creation_timestamp = Some(build::time(1000));
            node
        };
        for (case, node_object, renewed, since, now, silent, look_at) in [
            ("a heartbeat just now", heard("True"), None, 0, 1010, false, Some(1050)),
            ("a renewed lease", heard("True"), Some(1030), 0, 1060, false, Some(1080)),
            ("neither for too long", heard("True"), Some(990), 0, 1050, true, None),
            ("we have not watched for long", heard("True"), None, 1040, 1060, false, Some(1090)),
            ("known to be silent", heard("Unknown"), None, 0, 2000, false, None),
            ("new, and not heard of yet", never.clone(), None, 0, 1010, false, Some(1050)),
            ("never heard of", never, None, 0, 1050, true, None),
        ] {
            let renewed = renewed.map(at);
            let seen = NodeSeen { node: Arc::new(node_object), renewed, since: at(since), now: at(now) };
            let plan = node(&seen);
            assert_eq!(plan.conditions.is_some(), silent, "{case}");
            assert_eq!(plan.look_at, look_at.map(at), "{case}");
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
            ("ready for the first time", tainted(heard("True"), &created), 1001, Some(vec![gpu.clone()])),
            ("ready", heard("True"), 1001, None),
            ("ready, somebody's taint", tainted(heard("True"), &other), 1001, None),
            ("not ready", heard("False"), 1001, Some(both(taint::NOT_READY))),
            ("silent", heard("True"), 2000, Some(both(taint::UNREACHABLE))),
            ("silent, and said so", tainted(heard("Unknown"), &unreachable), 2000, None),
            ("back again", tainted(heard("True"), &unreachable), 1001, Some(vec![gpu.clone()])),
            (
                "back, not ready",
                tainted(heard("False"), &unreachable),
                1001,
                Some([vec![gpu], both(taint::NOT_READY)].concat()),
            ),
            ("cordoned", cordoned(heard("True")), 1001, Some(vec![format!("{}:NoSchedule", taint::UNSCHEDULABLE)])),
            (
                "uncordoned",
                tainted(heard("True"), &json!([{"key": taint::UNSCHEDULABLE, "effect": "NoSchedule"}])),
                1001,
                Some(vec![]),
            ),
        ] {
            let seen = NodeSeen { node: Arc::new(object), renewed: None, since: at(0), now: at(now) };
            let plan = node(&seen);
            assert_eq!(plan.taints.as_ref().map(|t| keys(Some(t))), want, "{case}");
            let added = plan.taints.iter().flatten().filter(|t| t.key == taint::NOT_READY);
            assert!(added.map(|t| t.time_added.clone()).all(|time| time == Some(Time(at(now)))), "{case}");
        }
    }

    #[test]
    fn pods_leave_when_they_tolerate_a_taint_no_longer() {
        let since = "1970-01-01T00:16:40Z";
        let unreachable = json!([{"key": taint::UNREACHABLE, "effect": "NoExecute", "timeAdded": since}]);
        let unsaid = json!([{"key": "x", "effect": "NoExecute"}]);
        let two = json!([{"key": taint::UNREACHABLE, "effect": "NoExecute", "timeAdded": since},
            {"key": "x", "effect": "NoExecute", "timeAdded": since}]);
        let off = json!([{"key": taint::OUT_OF_SERVICE, "effect": "NoExecute", "timeAdded": since}]);
        let soft = json!([{"key": "x", "effect": "NoSchedule"}]);
        let for_a_while = json!([{"key": taint::UNREACHABLE, "operator": "Exists", "tolerationSeconds": 300}]);
        let forever = json!([{"operator": "Exists"}]);
        let leaving = |on: bool| if on { json!("1970-01-01T00:00:00Z") } else { Value::Null };
        use PodDecision::{Collect, Evict, Finish, Keep, LookAt};
        for (case, ready, taints, tolerations, is_leaving, now, want) in [
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
                LookAt(at(1300)),
            ),
            ("tolerated no longer", "Unknown", unreachable.clone(), for_a_while.clone(), false, 1300, Evict),
            ("tolerated for ever", "Unknown", unreachable.clone(), forever, false, 9000, Keep),
            ("one of two is not tolerated", "Unknown", two, for_a_while, false, 1001, Evict),
            (
                "a taint that does not say since when",
                "True",
                unsaid,
                json!([{"key": "x", "operator": "Exists", "tolerationSeconds": 10}]),
                false,
                1500,
                LookAt(at(1510)),
            ),
            ("leaving already", "Unknown", unreachable, json!([]), true, 2000, Keep),
            ("out of service", "Unknown", off.clone(), json!([]), false, 2000, Evict),
            ("leaving a machine that is off", "Unknown", off.clone(), json!([]), true, 2000, Finish),
            ("leaving a node that is alive", "True", off, json!([]), true, 2000, Keep),
        ] {
            let mut object = build::pod("ns", "p", "n1", &[]);
            object.spec.as_mut().unwrap().tolerations = Some(serde_json::from_value(tolerations).unwrap());
            object.metadata.deletion_timestamp = serde_json::from_value(leaving(is_leaving)).unwrap();
            let node = Some(Arc::new(tainted(heard(ready), &taints)));
            let seen = PodSeen { pod: Arc::new(object), node, since: at(1500), now: at(now) };
            assert_eq!(pod(&seen), want, "{case}");
        }
        let ready =
            |status: &str, since: Value| json!([{"type": "Ready", "status": status, "lastTransitionTime": since}]);
        let (before, after) = (json!("1970-01-01T00:00:10Z"), json!("1970-01-01T00:00:30Z"));
        let middle = json!("1970-01-01T00:00:20Z");
        for (case, node, pod_says, want) in [
            ("ready on a ready node", "True", ready("True", before.clone()), Keep),
            ("ready before the node fell silent", "Unknown", ready("True", before.clone()), PodDecision::MarkNotReady),
            ("ready before the node was not", "False", ready("True", before.clone()), PodDecision::MarkNotReady),
            ("ready since the same second", "False", ready("True", middle.clone()), PodDecision::MarkNotReady),
            ("ready, nobody says since when", "False", ready("True", Value::Null), PodDecision::MarkNotReady),
            ("said to be ready after that", "False", ready("True", after), Keep),
            ("not ready anyway", "Unknown", ready("False", before), Keep),
            ("nothing said", "Unknown", json!([]), Keep),
        ] {
            let mut object = build::pod("ns", "p", "n1", &[]);
            object.status.get_or_insert_default().conditions = Some(serde_json::from_value(pod_says).unwrap());
            let mut node = heard(node);
            let says = node.status.as_mut().unwrap().conditions.as_mut().unwrap();
            says[0].last_transition_time = Some(serde_json::from_value(middle.clone()).unwrap());
            let seen = PodSeen { pod: Arc::new(object), node: Some(Arc::new(node)), since: at(1500), now: at(1500) };
            assert_eq!(pod(&seen), want, "{case}");
        }
        for (case, now, want) in [("missing for a moment", 1539, LookAt(at(1540))), ("missing", 1540, Collect)] {
            let object = Arc::new(build::pod("ns", "p", "n1", &[]));
            let seen = PodSeen { pod: object, node: None, since: at(1500), now: at(now) };
            assert_eq!(pod(&seen), want, "{case}");
        }
    }
}
