//! Decides which CSIStorageCapacity objects exist, one per storage class and topology segment, and what they contain.
//! Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleat_api::claim::waits_for_consumer;
use cleat_api::key::Meta as _;
use cleat_api::names::sha256_hex;
use cleat_api::well_known::label;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};

/// Topology labels. An empty segment covers all nodes.
pub type TopologySegment = BTreeMap<String, String>;

/// What one CSIStorageCapacity object is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CapacityKey {
    pub class: String,
    pub segment: TopologySegment,
}

/// Identifies the objects that this publisher may write and delete.
#[derive(Clone, Debug, Default)]
pub struct CapacityOwner {
    pub driver: String,
    pub namespace: String,
    /// The value of the label `csi.storage.k8s.io/managed-by`.
    pub managed_by: String,
    /// The object that owns the published objects, if any.
    pub owner_reference: Option<OwnerReference>,
}

/// A node on which the driver is registered.
#[derive(Clone, Debug)]
pub struct RegisteredNode {
    pub topology_keys: Vec<String>,
    pub labels: BTreeMap<String, String>,
}

/// The driver's segments. A node that lacks the label of one of its topology keys contributes none.
pub fn segments(nodes: &[RegisteredNode]) -> BTreeSet<TopologySegment> {
    let segment = |node: &RegisteredNode| {
        let label = |key: &String| Some((key.clone(), node.labels.get(key)?.clone()));
        node.topology_keys.iter().map(label).collect::<Option<TopologySegment>>()
    };
    nodes.iter().filter_map(segment).collect()
}

/// The keys for which an object must exist. Classes with immediate binding are included only if `include_immediate`.
pub fn wanted(
    classes: &[Arc<StorageClass>],
    segments: &BTreeSet<TopologySegment>,
    owner: &CapacityOwner,
    include_immediate: bool,
) -> BTreeSet<CapacityKey> {
    let is_wanted = |class: &&Arc<StorageClass>| {
        class.provisioner == owner.driver && (include_immediate || waits_for_consumer(class))
    };
    let key = |class: &Arc<StorageClass>, segment: &TopologySegment| CapacityKey {
        class: class.metadata.name.clone().unwrap_or_default(),
        segment: segment.clone(),
    };
    let classes = classes.iter().filter(is_wanted);
    classes.flat_map(|class| segments.iter().map(move |segment| key(class, segment))).collect()
}

pub fn is_managed(object: &CSIStorageCapacity, owner: &CapacityOwner) -> bool {
    let label = |key: &str| object.metadata.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
    object.metadata.namespace.as_deref() == Some(&owner.namespace)
        && label(label::CAPACITY_DRIVER) == Some(&owner.driver)
        && label(label::CAPACITY_MANAGER) == Some(&owner.managed_by)
}

pub fn key_of(object: &CSIStorageCapacity) -> CapacityKey {
    let labels = object.node_topology.as_ref().and_then(|topology| topology.match_labels.clone());
    CapacityKey { class: object.storage_class_name.clone(), segment: labels.unwrap_or_default() }
}

/// The managed objects to delete: those whose key is not wanted, and all but one of several objects with the same key.
pub fn surplus(
    existing: &[Arc<CSIStorageCapacity>],
    wanted: &BTreeSet<CapacityKey>,
    owner: &CapacityOwner,
) -> Vec<Arc<CSIStorageCapacity>> {
    let mut retained = BTreeSet::new();
    let mut sorted: Vec<_> = existing.iter().filter(|object| is_managed(object, owner)).collect();
    sorted.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let is_surplus = |object: &&&Arc<CSIStorageCapacity>| {
        let key = key_of(object);
        !(wanted.contains(&key) && retained.insert(key))
    };
    sorted.iter().filter(is_surplus).map(|object| (*object).clone()).collect()
}

/// The wanted keys for which no managed object exists.
pub fn missing(
    existing: &[Arc<CSIStorageCapacity>],
    wanted: BTreeSet<CapacityKey>,
    owner: &CapacityOwner,
) -> Vec<CapacityKey> {
    let managed = existing.iter().filter(|object| is_managed(object, owner));
    let present: BTreeSet<CapacityKey> = managed.map(|object| key_of(object)).collect();
    wanted.into_iter().filter(|key| !present.contains(key)).collect()
}

/// The managed object of this key that an update writes to: the first by name, unless it is being deleted.
pub fn current<'a>(
    existing: &'a [Arc<CSIStorageCapacity>],
    key: &CapacityKey,
    owner: &CapacityOwner,
) -> Option<&'a CSIStorageCapacity> {
    let candidates = existing.iter().filter(|object| is_managed(object, owner) && key_of(object) == *key);
    let first = candidates.min_by(|a, b| a.metadata.name.cmp(&b.metadata.name))?;
    (!first.metadata.is_deleting()).then_some(first.as_ref())
}

/// The driver's answer to GetCapacity, as quantities.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FreeCapacity {
    pub capacity: Option<Quantity>,
    pub maximum_volume_size: Option<Quantity>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum CapacityDecision {
    Nothing,
    Create(Box<CSIStorageCapacity>),
    Update(Box<CSIStorageCapacity>),
}

/// `existing` is the [`current`] object of this key.
pub fn publish(
    key: &CapacityKey,
    existing: Option<&CSIStorageCapacity>,
    free: FreeCapacity,
    owner: &CapacityOwner,
) -> CapacityDecision {
    let Some(existing) = existing else { return CapacityDecision::Create(Box::new(build(key, free, owner))) };
    let has_owner = owner.owner_reference.as_ref().is_none_or(|reference| {
        existing.metadata.owner_references.iter().flatten().any(|present| present.uid == reference.uid)
    });
    if has_owner && existing.capacity == free.capacity && existing.maximum_volume_size == free.maximum_volume_size {
        return CapacityDecision::Nothing;
    }
    let mut new = existing.clone();
    new.capacity = free.capacity;
    new.maximum_volume_size = free.maximum_volume_size;
    if !has_owner {
        new.metadata.owner_references = owner.owner_reference.clone().map(|reference| vec![reference]);
    }
    CapacityDecision::Update(Box::new(new))
}

/// The name is a digest of driver, manager and key, so that a repeated create finds the object of the first one.
fn build(key: &CapacityKey, free: FreeCapacity, owner: &CapacityOwner) -> CSIStorageCapacity {
    let segment: String = key.segment.iter().map(|(key, value)| format!("{key}={value},")).collect();
    let digest = sha256_hex(&format!("{}/{}/{}/{segment}", owner.driver, owner.managed_by, key.class));
    let labels = [(label::CAPACITY_DRIVER, &owner.driver), (label::CAPACITY_MANAGER, &owner.managed_by)];
    CSIStorageCapacity {
        metadata: ObjectMeta {
            namespace: Some(owner.namespace.clone()),
            name: Some(format!("csisc-{}", &digest[..16])),
            labels: Some(labels.map(|(key, value)| (key.to_owned(), value.clone())).into()),
            owner_references: owner.owner_reference.clone().map(|reference| vec![reference]),
            ..ObjectMeta::default()
        },
        capacity: free.capacity,
        maximum_volume_size: free.maximum_volume_size,
        node_topology: Some(LabelSelector {
            match_labels: Some(key.segment.clone()).filter(|segment| !segment.is_empty()),
            match_expressions: None,
        }),
        storage_class_name: key.class.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::claim::WAIT_FOR_FIRST_CONSUMER;
    use cleat_testing::build::{self, DRIVER};

    fn owner() -> CapacityOwner {
        CapacityOwner {
            driver: DRIVER.to_owned(),
            namespace: "ns".to_owned(),
            managed_by: "me".to_owned(),
            owner_reference: None,
        }
    }

    fn segment(zone: &str) -> TopologySegment {
        [("zone".to_owned(), zone.to_owned())].into()
    }

    fn key(class: &str, zone: &str) -> CapacityKey {
        CapacityKey { class: class.to_owned(), segment: segment(zone) }
    }

    fn created(key: &CapacityKey) -> Arc<CSIStorageCapacity> {
        let CapacityDecision::Create(object) = publish(key, None, FreeCapacity::default(), &owner()) else {
            panic!("not created")
        };
        Arc::new(*object)
    }

    #[test]
    fn one_object_is_wanted_per_waiting_class_and_segment() {
        let node = |zone: Option<&str>| RegisteredNode {
            topology_keys: vec!["zone".to_owned()],
            labels: zone.map(segment).unwrap_or_default(),
        };
        let found = segments(&[node(Some("a")), node(Some("b")), node(Some("a")), node(None)]);
        assert_eq!(found, [segment("a"), segment("b")].into());
        let keyless = RegisteredNode { topology_keys: Vec::new(), labels: segment("a") };
        assert_eq!(
            segments(&[keyless]),
            [TopologySegment::new()].into(),
            "a driver without topology has one segment for all nodes"
        );
        let mut waiting = build::class("wait", DRIVER);
        waiting.volume_binding_mode = Some(WAIT_FOR_FIRST_CONSUMER.to_owned());
        let classes = [waiting, build::class("now", DRIVER), build::class("other", "other")].map(Arc::new);
        let names = |include_immediate| {
            let keys = wanted(&classes, &[segment("a")].into(), &owner(), include_immediate);
            keys.into_iter().map(|key| key.class).collect::<Vec<_>>()
        };
        assert_eq!(names(false), ["wait"]);
        assert_eq!(names(true), ["now", "wait"]);
    }

    #[test]
    fn unwanted_objects_are_deleted_and_objects_of_other_managers_stay() {
        let mut duplicate = created(&key("wait", "a")).as_ref().clone();
        duplicate.metadata.name = Some("zzz".to_owned());
        let mut foreign = created(&key("old", "a")).as_ref().clone();
        foreign.metadata.labels.as_mut().unwrap().insert(label::CAPACITY_MANAGER.to_owned(), "you".to_owned());
        let existing = [created(&key("wait", "a")), Arc::new(duplicate), created(&key("old", "a")), Arc::new(foreign)];
        let others = [existing[3].clone()];
        assert_eq!(missing(&existing, [key("wait", "a"), key("wait", "b")].into(), &owner()), [key("wait", "b")]);
        assert_eq!(
            missing(&others, [key("old", "a")].into(), &owner()),
            [key("old", "a")],
            "an object of another manager does not count"
        );
        let deleted = surplus(&existing, &[key("wait", "a")].into(), &owner());
        let mut names: Vec<_> = deleted.iter().map(|o| o.metadata.name.clone().unwrap()).collect();
        names.sort();
        let mut want = vec![existing[2].metadata.name.clone().unwrap(), "zzz".to_owned()];
        want.sort();
        assert_eq!(names, want);
    }

    #[test]
    fn an_object_is_written_only_when_its_content_changes() {
        let object = created(&key("wait", "a"));
        assert_eq!(key_of(&object), key("wait", "a"));
        let free = FreeCapacity { capacity: Some(Quantity("5Gi".to_owned())), maximum_volume_size: None };
        let with_owner = CapacityOwner {
            owner_reference: Some(OwnerReference { uid: "u".to_owned(), ..OwnerReference::default() }),
            ..owner()
        };
        let decide = |free, owner: &CapacityOwner| publish(&key("wait", "a"), Some(&object), free, owner);
        assert_eq!(decide(FreeCapacity::default(), &owner()), CapacityDecision::Nothing);
        let CapacityDecision::Update(new) = decide(free, &owner()) else { panic!("more is free") };
        assert_eq!(new.capacity.unwrap().0, "5Gi");
        let CapacityDecision::Update(new) = decide(FreeCapacity::default(), &with_owner) else {
            panic!("the object gets an owner")
        };
        assert_eq!(new.metadata.owner_references.unwrap()[0].uid, "u");
    }
}
