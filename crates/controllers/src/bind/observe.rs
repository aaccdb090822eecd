//! From caches to what a decision needs, and nothing more.

use std::sync::Arc;
use std::time::Duration;

use cleat_api::claim::{self, claim_class, claim_ref, claim_ref_key, volume_class, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::annotation;
use cleat_api::{migrate, pod};
use cleat_runtime::write::{self, WriteError};
use cleat_runtime::{Cache, Caches, Change, Index, Queue};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;

use super::decide::{self, ClaimDecision, ClaimSeen, Owner};
use super::matching::{self, Choice};
use super::shelf::{Shelf, Taken};
use super::{Binder, Options, Subject};

#[derive(Clone)]
pub(super) struct Observed {
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) classes: Cache<StorageClass>,
    /// Volumes by the claim they are reserved for.
    reserved: Index<PersistentVolume>,
    pub(super) shelf: Shelf,
    /// Claims without a volume by class, and claims by the volume they name.
    pending: Index<PersistentVolumeClaim>,
    naming: Index<PersistentVolumeClaim>,
    pub(super) pods: Cache<Pod>,
    /// Pods that have not ended by the claims they name.
    users: Index<Pod>,
    options: Arc<Options>,
}

/// How long after a volume was not used after all others look at it: what kept it from being used may last.
const RETURNED: Duration = Duration::from_millis(20);

/// The index term of a claim that says nothing about its class; no class can have this name.
const UNSAID: &str = "/unsaid";

impl Observed {
    pub(super) fn new(caches: &Caches, options: Options) -> Self {
        let (claims, volumes, pods) = (caches.claims(), caches.volumes(), caches.pods());
        Self {
            users: pods.index(|p| naming(p).map(|claim| claim.to_string()).collect()),
            pods,
            reserved: volumes.index(|v| claim_ref(v).map(|r| claim_ref_key(r).to_string()).into_iter().collect()),
            shelf: Shelf::new(volumes.clone()),
            pending: claims.index(|c| match volume_name(c) {
                None => vec![claim_class(c).unwrap_or(UNSAID).to_owned()],
                Some(_) => Vec::new(),
            }),
            naming: claims.index(|c| volume_name(c).map(ToOwned::to_owned).into_iter().collect()),
            classes: caches.classes(),
            options: Arc::new(options),
            claims,
            volumes,
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.claims.synced(), self.volumes.synced(), self.classes.synced(), self.pods.synced());
    }

    /// The claim, and with it the volume it may take: nobody else in this process takes it meanwhile.
    pub(super) fn claim(&self, key: &Key, queue: &Queue<Subject>) -> Option<(ClaimSeen, Option<Taken>)> {
        let claim = self.claims.get(key)?;
        let named = volume_name(&claim).and_then(|name| self.volumes.named(name));
        let (mut candidates, mut taken) = (Vec::new(), None);
        let is_open = claim.metadata.annotation(annotation::BIND_COMPLETED).is_none() && volume_name(&claim).is_none();
        if is_open {
            candidates = self.reserved_for(key);
            let class = claim_class(&claim).and_then(|name| self.classes.named(name));
            // A claim that waits for its consumer takes no volume here: the scheduler chooses.
            let chooses = !class.is_some_and(|c| claim::waits_for_consumer(&c));
            if chooses && matching::best(&claim, &candidates, Choice::ReservedOnly).is_none() {
                let queue = queue.clone();
                let returned = move |v: &PersistentVolume| {
                    queue.add_after(Subject::Class(volume_class(v).to_owned()), RETURNED);
                };
                if let Some((volume, hold)) = self.shelf.take(&claim, returned) {
                    candidates.push(volume);
                    taken = Some(hold);
                }
            }
        }
        let class = claim_class(&claim).filter(|name| !name.is_empty()).map(|name| self.classes.named(name));
        let default_class = if claim_class(&claim).is_none() && is_open { self.default_class() } else { None };
        let users = self.users.get(&key.to_string());
        let waiting = users.iter().filter(|p| pod::node_name(p).is_none());
        let mut consumers: Vec<String> = waiting.filter_map(|p| p.metadata.name.clone()).collect();
        consumers.sort();
        let in_use = users.iter().any(|p| pod::uses_claim(p, &claim));
        let provisioner = class.as_ref().and_then(Option::as_ref).map(|c| c.provisioner.as_str());
        let provisioner = provisioner.map(|name| migrate::driver_of(name).unwrap_or(name));
        let provisioner_holds = provisioner.is_some_and(|name| self.options.holding_provisioners.contains(name));
        let seen = ClaimSeen { claim, named, candidates, class, default_class, consumers, in_use, provisioner_holds };
        Some((seen, taken))
    }

    fn default_class(&self) -> Option<String> {
        let classes = self.classes.all();
        claim::default_class(classes.iter().map(Arc::as_ref)).and_then(|c| c.metadata.name.clone())
    }

    /// The claims that name the volume, and the one it is reserved for. One that is not here yet looks for itself when it
    /// comes.
    pub(super) fn claims_of(&self, volume: &PersistentVolume) -> impl Iterator<Item = Arc<PersistentVolumeClaim>> {
        let reserved = claim_ref(volume).and_then(|reference| self.claims.get(&claim_ref_key(reference)));
        let naming = self.naming.get(volume.metadata.name.as_deref().unwrap_or_default());
        reserved.into_iter().chain(naming)
    }

    /// The volumes that a change of a claim may concern: the one it points at and, once it points anywhere or is gone,
    /// those that were made for it meanwhile.
    pub(super) fn volumes_of(
        &self,
        change: &Change<PersistentVolumeClaim>,
        key: &Key,
    ) -> impl Iterator<Item = Arc<PersistentVolume>> {
        let name = volume_name(change.object());
        let gone = matches!(change, Change::Deleted(_));
        let reserved = if name.is_some() || gone { self.reserved_for(key) } else { Vec::new() };
        let pointed_at = name.and_then(|name| self.volumes.named(name));
        pointed_at.into_iter().chain(reserved)
    }

    /// A look at the claim after this change would come to nothing new.
    pub(super) fn is_told(&self, change: &Change<PersistentVolumeClaim>) -> bool {
        match change {
            Change::Deleted(_) => true,
            Change::Applied { old, new } => {
                let class = || claim_class(new).and_then(|name| self.classes.named(name));
                let asked = |old: &PersistentVolumeClaim, class: &StorageClass| {
                    let provisioner = migrate::driver_of(&class.provisioner).unwrap_or(&class.provisioner);
                    decide::was_just_asked(old, new, provisioner)
                };
                let old = old.as_ref().filter(|old| !decide::is_complete(old));
                self.claim_rests(new) || old.is_some_and(|old| class().is_some_and(|class| asked(old, &class)))
            }
        }
    }

    /// The claim has what it asked for, and a look at it would come to nothing.
    pub(super) fn claim_rests(&self, claim: &Arc<PersistentVolumeClaim>) -> bool {
        let named = || volume_name(claim).and_then(|name| self.volumes.named(name));
        decide::is_complete(claim)
            && decide::claim(&ClaimSeen::complete(claim.clone(), named())) == ClaimDecision::Settled
    }

    /// A look at the volume would come to nothing, or leave everything to its claim.
    pub(super) fn volume_rests(&self, volume: &PersistentVolume) -> bool {
        decide::volume(volume, &self.owner(volume)).is_rest()
    }

    /// The claim a volume is reserved for, as far as the cache shows.
    pub(super) fn owner(&self, volume: &PersistentVolume) -> Owner {
        let Some((key, uid)) = owner_of(volume) else { return Owner::Nobody };
        self.claims.get(&key).filter(|claim| claim.metadata.uid() == uid).map_or(Owner::Gone, Owner::Claim)
    }

    pub(super) fn reserved_for(&self, claim: &Key) -> Vec<Arc<PersistentVolume>> {
        self.reserved.get(&claim.to_string())
    }

    /// Claims that a free volume of this class could serve.
    pub(super) fn pending_of_class(&self, class: &str) -> Vec<Arc<Key>> {
        let mut claims = self.pending.keys(class);
        if class.is_empty() {
            claims.extend(self.pending.keys(UNSAID));
        }
        claims
    }

    /// Claims that a new or changed class may concern.
    pub(super) fn unbound(&self) -> Vec<Arc<PersistentVolumeClaim>> {
        self.claims.each().filter(|c| volume_name(c).is_none()).collect()
    }
}

/// The claims that a pod names which has not ended.
fn naming(pod: &Pod) -> impl Iterator<Item = Key> {
    let claims = if pod::is_terminated(pod) { Vec::new() } else { pod::claim_volumes(pod) };
    claims.into_iter().map(|used| used.claim)
}

/// The claims that a pod without a node uses.
pub(super) fn waiting_for(pod: &Pod) -> impl Iterator<Item = Key> {
    naming(pod).filter(|_| pod::node_name(pod).is_none())
}

/// The claim that a volume is reserved for, and its uid; none where it is reserved by name only.
fn owner_of(volume: &PersistentVolume) -> Option<(Key, &str)> {
    let reference = claim_ref(volume)?;
    let uid = reference.uid.as_deref().filter(|uid| !uid.is_empty())?;
    Some((claim_ref_key(reference), uid))
}

impl Binder {
    /// The claim a volume is reserved for. What the cache does not show is asked of the server: a volume is released,
    /// and then deleted, on the strength of this answer.
    pub(super) async fn owner(&self, volume: &PersistentVolume) -> Result<Owner, WriteError> {
        let shown = self.observed.owner(volume);
        let (Owner::Gone, Some((key, uid))) = (&shown, owner_of(volume)) else { return Ok(shown) };
        let live = write::get_live::<PersistentVolumeClaim>(&self.context.client, &key).await?;
        Ok(match live.filter(|c| c.metadata.uid() == uid) {
            Some(claim) => Owner::Claim(Arc::new(claim)),
            None => Owner::Gone,
        })
    }
}
