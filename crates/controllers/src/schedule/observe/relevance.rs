//! What of all there is belongs in the picture. Pure: whoever has everything is asked for what is missing.
//!
//! Most claims are bound and used by no pod that is to be placed or has a place. Neither they nor their volumes matter to
//! anybody then, and with many of them they would take most of the room: they are taken in when a pod comes that uses them.

use std::collections::BTreeSet;
use std::sync::Arc;

use cleat_api::claim::{claim_ref, claim_ref_key, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_api::pod;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;

use super::World;
use super::needs::is_bound;

/// Everything there is.
pub struct Stock<'a> {
    pub claim: &'a dyn Fn(&Key) -> Option<Arc<PersistentVolumeClaim>>,
    pub volume: &'a dyn Fn(&str) -> Option<Arc<PersistentVolume>>,
}

impl World {
    pub fn take_pod(&mut self, key: &Key, object: Option<Arc<Pod>>, stock: &Stock<'_>) {
        let mut claims = self.claims_of(key);
        self.set_pod(key, object);
        claims.extend(self.claims_of(key));
        for claim in claims {
            if self.users.contains_key(&claim) != self.claims.contains_key(&claim) {
                self.take_claim(&claim, stock);
            }
        }
    }

    pub fn take_claim(&mut self, key: &Key, stock: &Stock<'_>) {
        let shown = (stock.claim)(key);
        let claim = shown.clone().filter(|_| self.users.contains_key(key));
        if claim.is_none() && !self.claims.contains_key(key) {
            // Its volume may have come while it was not yet the claim's for good.
            if let Some(name) = shown.as_deref().and_then(volume_name) {
                self.reconsider_volume(name, stock);
            }
            return;
        }
        let before = self.claim(key).as_deref().and_then(volume_name).map(ToOwned::to_owned);
        // The volume comes first: with the claim, the pods that use it are counted.
        if let Some(name) = claim.as_deref().and_then(volume_name).filter(|name| !self.volumes.contains_key(*name)) {
            self.set_volume(name, (stock.volume)(name));
        }
        self.set_claim(key, claim);
        if let Some(before) = before {
            self.reconsider_volume(&before, stock);
        }
    }

    pub fn take_volume(&mut self, name: &str, stock: &Stock<'_>) {
        let volume = (stock.volume)(name).filter(|volume| self.is_needed(name, volume, stock));
        if volume.is_some() || self.volumes.contains_key(name) {
            self.set_volume(name, volume);
        }
    }

    pub fn take_attachment(&mut self, name: &str, object: Option<&VolumeAttachment>, stock: &Stock<'_>) {
        let before = self.attached_volume(name);
        self.set_attachment(name, object);
        for volume in before.into_iter().chain(self.attached_volume(name)) {
            self.reconsider_volume(&volume, stock);
        }
    }

    /// Takes the volume in or out, if it should be the other way. One that is in is as new as the last that was heard of it.
    fn reconsider_volume(&mut self, name: &str, stock: &Stock<'_>) {
        let is_needed = (stock.volume)(name).is_some_and(|volume| self.is_needed(name, &volume, stock));
        if is_needed != self.volumes.contains_key(name) {
            self.take_volume(name, stock);
        }
    }

    /// Free, set aside, attached somewhere, or of a claim that is in the picture. A volume that is its claim's for good is
    /// found by the claim, when that comes.
    fn is_needed(&self, name: &str, volume: &PersistentVolume, stock: &Stock<'_>) -> bool {
        let Some(reference) = claim_ref(volume) else { return true };
        let key = claim_ref_key(reference);
        let is_owner = |claim: &PersistentVolumeClaim| {
            Some(claim.metadata.uid()) == reference.uid.as_deref() && volume_name(claim) == Some(name)
        };
        self.users.contains_key(&key)
            || self.naming.contains_key(name)
            || self.attached.contains_key(name)
            || !(stock.claim)(&key).is_some_and(|claim| is_owner(&claim) && is_bound(&claim))
    }

    fn claims_of(&self, pod: &Key) -> BTreeSet<Key> {
        let waiting = self.waiting.get(pod).map(|waiting| &waiting.pod);
        let known = waiting.or_else(|| self.placed.get(pod).map(|placed| &placed.pod));
        known.into_iter().flat_map(|pod| pod::claim_volumes(pod)).map(|used| used.claim).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::claim::is_reserved_for;
    use cleat_testing::build;
    use std::collections::{BTreeMap, HashMap};

    /// Everything, a picture of what matters of it, and one of all of it.
    #[derive(Default)]
    struct Model {
        claims: HashMap<Key, Arc<PersistentVolumeClaim>>,
        volumes: HashMap<String, Arc<PersistentVolume>>,
        pods: HashMap<Key, Arc<Pod>>,
        attachments: BTreeMap<String, VolumeAttachment>,
        some: World,
        all: World,
        revision: u64,
    }

    impl Model {
        fn with_stock(&mut self, take: impl FnOnce(&mut World, &Stock<'_>)) {
            let (claims, volumes) = (&self.claims, &self.volumes);
            let stock = Stock { claim: &|key| claims.get(key).cloned(), volume: &|name| volumes.get(name).cloned() };
            take(&mut self.some, &stock);
        }

        fn next(&mut self) -> Option<String> {
            self.revision += 1;
            Some(self.revision.to_string())
        }

        fn claim(&mut self, name: &str, claim: Option<PersistentVolumeClaim>) {
            let key = Key::namespaced("ns", name);
            self.claims.remove(&key);
            if let Some(mut claim) = claim {
                claim.metadata.resource_version = self.next();
                self.claims.insert(key.clone(), Arc::new(claim));
            }
            let object = self.claims.get(&key).cloned();
            self.with_stock(|world, stock| world.take_claim(&key, stock));
            self.all.set_claim(&key, object);
        }

        fn volume(&mut self, name: &str, volume: Option<PersistentVolume>) {
            self.volumes.remove(name);
            if let Some(mut volume) = volume {
                volume.metadata.resource_version = self.next();
                self.volumes.insert(name.to_owned(), Arc::new(volume));
            }
            let object = self.volumes.get(name).cloned();
            self.with_stock(|world, stock| world.take_volume(name, stock));
            self.all.set_volume(name, object);
        }

        fn pod(&mut self, name: &str, pod: Option<Pod>) {
            let key = Key::namespaced("ns", name);
            self.pods.remove(&key);
            self.pods.extend(pod.map(|pod| (key.clone(), Arc::new(pod))));
            let object = self.pods.get(&key).cloned();
            self.with_stock(|world, stock| world.take_pod(&key, object.clone(), stock));
            self.all.set_pod(&key, object);
        }

        fn attachment(&mut self, volume: &str, is_there: bool) {
            let attachment = build::attachment(&build::volume(volume, "fast", "1Gi"), "n1");
            let name = attachment.metadata.name.clone().unwrap();
            self.with_stock(|world, stock| {
                world.take_attachment(&name, is_there.then_some(&attachment), stock);
            });
            self.all.set_attachment(&name, is_there.then_some(&attachment));
            self.attachments.remove(&name);
            if is_there {
                self.attachments.insert(name, attachment);
            }
        }

        /// Whatever a decision about any pod could look at.
        fn shown(&self, world: &World) -> Vec<String> {
            let version = |volume: Option<Arc<PersistentVolume>>| {
                volume.map(|v| (v.metadata.name.clone(), v.metadata.resource_version.clone()))
            };
            let mut shown = Vec::new();
            for (claim, users) in world.users.iter().collect::<BTreeMap<_, _>>() {
                let found = world.claim(claim);
                let named = found.as_deref().and_then(volume_name).and_then(|name| world.volume(name));
                let is_for = |v: &Arc<PersistentVolume>| found.as_ref().is_some_and(|claim| is_reserved_for(v, claim));
                let reserved: Vec<_> = world.reserved_for(claim).filter(is_for).map(|v| version(Some(v))).collect();
                let found = found.as_ref().map(|c| c.metadata.resource_version.clone());
                shown.push(format!("{claim} {users:?} {found:?} {:?} {reserved:?}", version(named)));
            }
            let free: Vec<_> = world.free_volumes("fast", Some("n1"), 0).map(|v| version(Some(v))).collect();
            let attached: Vec<_> = self.volumes.keys().filter(|name| world.attached.contains_key(*name)).collect();
            let attached: BTreeMap<_, _> =
                attached.into_iter().map(|name| (name, version(world.volume(name)))).collect();
            let counted: BTreeMap<_, _> = world.placed.iter().map(|(pod, placed)| (pod, &placed.volumes)).collect();
            let ready: Vec<_> = world.ready.iter().map(|(_, _, pod)| pod).collect();
            shown.push(format!("{free:?} {attached:?} {counted:?} {ready:?}"));
            shown
        }
    }

    #[test]
    fn a_bound_pair_is_in_the_picture_while_a_pod_uses_it() {
        let mut model = Model::default();
        let (claim, volume) =
            build::bound(build::claim("ns", "c1", Some("fast"), "1Gi"), build::volume("v1", "fast", "1Gi"));
        let is_in = |model: &Model| (model.some.claims.len(), model.some.volumes.len());
        model.volume("v1", Some(build::volume("v1", "fast", "1Gi")));
        assert_eq!(is_in(&model), (0, 1), "a free volume");
        model.claim("c1", Some(claim));
        model.volume("v1", Some(volume.clone()));
        assert_eq!(is_in(&model), (0, 0), "nobody uses them");
        let (late, early) =
            build::bound(build::claim("ns", "c2", Some("fast"), "1Gi"), build::volume("v2", "fast", "1Gi"));
        model.volume("v2", Some(early));
        assert_eq!(is_in(&model), (0, 1), "its claim is not there yet");
        model.claim("c2", Some(late));
        assert_eq!(is_in(&model), (0, 0), "the claim has come, and nobody uses it");
        model.pod("p", Some(build::pod("ns", "p", "", &["c1"])));
        assert_eq!(is_in(&model), (1, 1), "a pod waits");
        model.pod("p", Some(build::pod("ns", "p", "n1", &["c1"])));
        assert_eq!(is_in(&model), (1, 1), "a pod has its place");
        model.attachment("v1", true);
        model.pod("p", None);
        assert_eq!(is_in(&model), (0, 1), "still attached");
        model.attachment("v1", false);
        assert_eq!(is_in(&model), (0, 0), "given back");
        model.claim("c1", None);
        model.volume("v1", Some(volume));
        assert_eq!(is_in(&model), (0, 1), "without its claim it is not at rest");
    }

    #[test]
    fn nobody_can_tell_the_picture_from_one_of_everything() {
        let mut model = Model::default();
        let mut seed = 1_u64;
        let mut random = move |below: usize| {
            // xorshift: the same walk every time.
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            usize::try_from(seed % below as u64).unwrap()
        };
        for step in 0..3000 {
            let number = random(4);
            let (claim, volume) = (format!("c{number}"), format!("v{number}"));
            let known = model.claims.get(&Key::namespaced("ns", &claim)).map(|claim| claim.as_ref().clone());
            let fresh = || {
                let mut fresh = build::claim("ns", &claim, Some("fast"), "1Gi");
                fresh.metadata.uid = Some(format!("{claim}-{step}"));
                fresh
            };
            let is_open = known.as_ref().is_none_or(|claim| volume_name(claim).is_none());
            // What the server lets happen: a claim that points at a volume points there for good.
            match random(12) {
                0 => model.claim(&claim, None),
                1 if known.is_none() => model.claim(&claim, Some(fresh())),
                1 => {
                    let mut undone = known.unwrap_or_else(fresh);
                    undone.metadata.annotations = None;
                    model.claim(&claim, Some(undone));
                }
                2 | 3 if is_open => {
                    let open = known.unwrap_or_else(fresh);
                    model.claim(&claim, Some(build::bound(open, build::volume(&volume, "fast", "1Gi")).0));
                }
                4 if is_open => {
                    // It names a volume that may be another's.
                    let other = build::volume(&format!("v{}", random(4)), "fast", "1Gi");
                    model.claim(&claim, Some(build::bound(known.unwrap_or_else(fresh), other).0));
                }
                2..=4 => model.claim(&claim, known),
                5 => model.volume(&volume, None),
                6 => model.volume(&volume, Some(build::volume(&volume, "fast", "1Gi"))),
                7 | 8 => {
                    let free = build::volume(&volume, "fast", "1Gi");
                    model.volume(&volume, Some(build::bound(known.unwrap_or_else(fresh), free).1));
                }
                9 => model.attachment(&volume, random(2) == 0),
                10 => model.pod(&format!("p{}", random(3)), None),
                _ => {
                    // A pod keeps its claims; what changes is that it gets a node.
                    let name = format!("p{}", random(3));
                    let known = model.pods.get(&Key::namespaced("ns", &name)).map(|pod| pod.as_ref().clone());
                    let fresh = || {
                        let claims = [claim.as_str(), &format!("c{}", random(4))];
                        let mut pod = build::pod("ns", &name, ["", "n1"][random(2)], &claims);
                        pod.metadata.uid = Some(format!("{name}-{step}"));
                        pod
                    };
                    let mut pod = known.unwrap_or_else(fresh);
                    if step % 2 == 0 {
                        pod.spec.as_mut().unwrap().node_name = Some("n1".to_owned());
                    }
                    model.pod(&name, Some(pod));
                }
            }
            assert_eq!(model.shown(&model.some), model.shown(&model.all), "step {step}");
            let kept: Vec<String> = model.some.volumes.keys().cloned().collect();
            let volumes = model.volumes.clone();
            model.with_stock(|world, stock| {
                let is_needed = |name: &String| world.is_needed(name, &volumes[name], stock);
                assert!(kept.iter().all(is_needed), "step {step}: {kept:?}");
            });
        }
    }
}
