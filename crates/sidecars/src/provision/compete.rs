//! Takes a claim that no node was chosen for: after a while of its own, and if its driver has room, each provisioner
//! chooses its node. The server lets one of them.

use cleat_api::claim;
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::annotation;
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, Part};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use tracing::{debug, info};

use super::Provisioner;
use super::decide::{self, ClaimDecision, ClaimSeen, local};
use crate::Failure;

impl Provisioner {
    pub(super) async fn compete(&self, seen: &ClaimSeen) -> Result<Outcome, Failure> {
        let (Some(local), Some(pace)) = (&self.options.choices.local, &self.options.local) else {
            return Ok(Outcome::Done);
        };
        let uid = seen.claim.metadata.uid();
        if let Some(left) = self.ledger.until_turn(uid, pace) {
            return Ok(Outcome::RequeueAfter(left));
        }
        if !self.has_room(seen, &local.node).await {
            debug!(claim = %Key::of(&seen.claim.metadata), "no room for the claim on this node");
            return Ok(Outcome::RequeueAfter(self.ledger.next_turn(uid, pace)));
        }
        let patch = serde_json::json!({ "metadata": {
            "resourceVersion": seen.claim.metadata.resource_version,
            "annotations": { annotation::SELECTED_NODE: local.node },
        }});
        let key = Key::of(&seen.claim.metadata);
        match write::merge::<PersistentVolumeClaim>(&self.context.client, Part::Whole, &key, &patch).await {
            Ok(taken) => {
                info!(claim = %key, node = local.node, "claim taken for this node");
                self.ledger.settled(uid);
                self.observed.claims.observe_write(taken);
                Ok(Outcome::Done)
            }
            // Somebody was faster, or wrote something else; the watch tells.
            Err(error) if error.is_conflict() => Ok(Outcome::RequeueAfter(self.ledger.next_turn(uid, pace))),
            Err(error) => Ok(error.ignore_not_found().map(|()| Outcome::Done)?),
        }
    }

    /// Asked as if the volume were made now. What stands in the way of that is no reason to leave the claim to others, who
    /// would all do the same: who has taken it says why it fails.
    async fn has_room(&self, seen: &ClaimSeen, node: &str) -> bool {
        let Some(wanted) = claim::requested_storage(&seen.claim).map(|size| size.to_bytes()) else { return true };
        let mut chosen = seen.claim.as_ref().clone();
        let annotations = chosen.metadata.annotations.get_or_insert_default();
        annotations.insert(annotation::SELECTED_NODE.to_owned(), node.to_owned());
        let seen = ClaimSeen { claim: chosen.into(), ..seen.clone() };
        let ClaimDecision::Provision(outline) = decide::claim(&seen, &self.can, &self.options.choices) else {
            return true;
        };
        let Ok(fetched) = self.fetch(&seen, &outline).await else { return true };
        let Ok(plan) = outline.complete(&seen, fetched, &self.can, &self.options.choices) else { return true };
        for question in local::questions(&plan.request) {
            match self.driver.client.get_capacity(question).await {
                Ok(answer) if answer.available_capacity < wanted => {}
                Ok(_) => return true,
                Err(error) => {
                    debug!(%error, "the driver does not say how much room it has");
                    return true;
                }
            }
        }
        false
    }
}
