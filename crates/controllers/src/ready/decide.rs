//! Which taints should a node have instead of those it has? Pure.

use cleat_api::condition::node_is_ready;
use cleat_api::keys::taint;
use k8s_openapi::api::core::v1::{Node, Taint};

/// The taints to write; nothing if they are right as they are.
pub fn decide(node: &Node) -> Option<Vec<Taint>> {
    let taints = node.spec.as_ref()?.taints.as_ref()?;
    let is_ours = |t: &Taint| t.key == taint::NOT_READY && t.effect == "NoSchedule";
    if !node_is_ready(node) || !taints.iter().any(is_ours) {
        return None;
    }
    Some(taints.iter().filter(|t| !is_ours(t)).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::build;

    #[test]
    fn a_ready_node_loses_the_taint_it_began_with_and_no_other() {
        let taint = |key: &str, effect: &str| Taint { key: key.into(), effect: effect.into(), ..Taint::default() };
        let ours = taint(taint::NOT_READY, "NoSchedule");
        let stricter = taint(taint::NOT_READY, "NoExecute");
        let other = taint("k", "NoSchedule");
        for (case, ready, has, want) in [
            ("ready", true, vec![ours.clone()], Some(vec![])),
            (
                "others stay",
                true,
                vec![other.clone(), ours.clone(), stricter.clone()],
                Some(vec![other.clone(), stricter]),
            ),
            ("not ready", false, vec![ours], None),
            ("done", true, vec![other], None),
        ] {
            let mut node = build::node("n");
            node.spec.get_or_insert_default().taints = Some(has);
            if !ready {
                node.status = None;
            }
            assert_eq!(decide(&node), want, "{case}");
        }
    }
}
