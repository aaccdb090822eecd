//! Where should a pod go? Pure.

use std::borrow::Borrow;

use cleat_api::condition::node_is_ready;
use cleat_api::key::Meta as _;
use cleat_api::pod;
use k8s_openapi::api::core::v1::{Node, Pod};

pub const SCHEDULER: &str = "default-scheduler";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It has a node, is on its way out, or belongs to another scheduler.
    NotOurs,
    Bind(String),
    Wait(Wait),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    NoReadyNode {
        nodes: usize,
    },
    /// Several nodes are ready and the pod names none.
    Undetermined {
        nodes: usize,
    },
}

pub fn decide<N: Borrow<Node>>(pod: &Pod, nodes: &[N]) -> Decision {
    let scheduler = pod.spec.as_ref().and_then(|s| s.scheduler_name.as_deref()).unwrap_or(SCHEDULER);
    if pod::node_name(pod).is_some() || pod.metadata.is_deleting() || scheduler != SCHEDULER {
        return Decision::NotOurs;
    }
    let mut open = nodes.iter().map(Borrow::borrow).filter(|node: &&Node| {
        let cordoned = node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false);
        node_is_ready(node) && !cordoned && !node.metadata.is_deleting()
    });
    match (open.next(), open.count()) {
        (None, _) => Decision::Wait(Wait::NoReadyNode { nodes: nodes.len() }),
        (Some(only), 0) => Decision::Bind(only.metadata.name.clone().unwrap_or_default()),
        (Some(_), others) => Decision::Wait(Wait::Undetermined { nodes: others + 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::build;

    #[test]
    fn a_pod_goes_to_the_only_node() {
        let cordoned = {
            let mut n = build::node("n1");
            n.spec.get_or_insert_default().unschedulable = Some(true);
            n
        };
        let silent = Node { status: None, ..build::node("n2") };
        let free = build::pod("ns", "p", "", &[]);
        let foreign = {
            let mut p = free.clone();
            p.spec.as_mut().unwrap().scheduler_name = Some("other".to_owned());
            p
        };
        let deleting = {
            let mut p = free.clone();
            p.metadata.deletion_timestamp = Some(build::time(1));
            p
        };
        let bind = |n: &str| Decision::Bind(n.to_owned());
        for (case, pod, nodes, want) in [
            ("the only node", &free, vec![build::node("n1")], bind("n1")),
            ("a cordoned node is no choice", &free, vec![cordoned.clone(), build::node("n3")], bind("n3")),
            ("nor is one that is not ready", &free, vec![silent.clone(), build::node("n3")], bind("n3")),
            ("no node", &free, vec![], Decision::Wait(Wait::NoReadyNode { nodes: 0 })),
            ("none ready", &free, vec![silent, cordoned], Decision::Wait(Wait::NoReadyNode { nodes: 2 })),
            (
                "several",
                &free,
                vec![build::node("a"), build::node("b")],
                Decision::Wait(Wait::Undetermined { nodes: 2 }),
            ),
            ("placed by its author", &build::pod("ns", "p", "n9", &[]), vec![build::node("n1")], Decision::NotOurs),
            ("another scheduler's", &foreign, vec![build::node("n1")], Decision::NotOurs),
            ("leaving", &deleting, vec![build::node("n1")], Decision::NotOurs),
        ] {
            assert_eq!(decide(pod, &nodes), want, "{case}");
        }
    }
}
