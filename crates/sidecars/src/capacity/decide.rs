//! Which CSIStorageCapacity objects there should be: one for each class and each place. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleat_api::claim::waits_for_consumer;
use cleat_api::well_known::label;
use cleat_api::names::sha256_hex;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};

/// The labels of a place; none at all is everywhere.
pub type Segment = BTreeMap<String, String>;

/// One class in one place.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Item {
    pub class: String,
    pub segment: Segment,
}

/// Whose objects these are.
#[derive(Clone, Debug, Default)]
pub struct Manager {
    pub driver: String,
    pub namespace: String,
    /// The value of the label `managed-by`.
    pub name: String,
    pub owner: Option<OwnerReference>,
}

/// A node on which the driver is registered.
#[derive(Clone, Debug)]
pub struct NodeSeen {
    pub keys: Vec<String>,
    pub labels: BTreeMap<String, String>,
}

/// The places of the driver. A node that lacks one of its labels is in none.
pub fn segments(nodes: &[NodeSeen]) -> BTreeSet<Segment> {
    let place = |node: &NodeSeen| {
        node.keys.iter().map(|key| Some((key.clone(), node.labels.get(key)?.clone()))).collect::<Option<Segment>>()
    };
    nodes.iter().filter_map(place).collect()
}

pub fn wanted(
    classes: &[Arc<StorageClass>],
    segments: &BTreeSet<Segment>,
    manager: &Manager,
    immediate: bool,
) -> BTreeSet<Item> {
    let ours = classes.iter().filter(|c| c.provisioner == manager.driver && (immediate || waits_for_consumer(c)));
    let item = |class: &Arc<StorageClass>, segment: &Segment| Item {
        class: class.metadata.name.clone().unwrap_or_default(),
        segment: segment.clone(),
    };
    ours.flat_map(|class| segments.iter().map(move |segment| item(class, segment))).collect()
}

pub fn is_managed(object: &CSIStorageCapacity, manager: &Manager) -> bool {
    let says = |key: &str| object.metadata.labels.as_ref().and_then(|l| l.get(key)).map(String::as_str);
    object.metadata.namespace.as_deref() == Some(&manager.namespace)
        && says(label::CAPACITY_DRIVER) == Some(&manager.driver)
        && says(label::CAPACITY_MANAGER) == Some(&manager.name)
}

pub fn item_of(object: &CSIStorageCapacity) -> Item {
    let labels = object.node_topology.as_ref().and_then(|t| t.match_labels.clone());
    Item { class: object.storage_class_name.clone(), segment: labels.unwrap_or_default() }
}

/// Of several objects for the same item one is kept; those that nobody wants any more go.
pub fn surplus(
    existing: &[Arc<CSIStorageCapacity>],
    wanted: &BTreeSet<Item>,
    manager: &Manager,
) -> Vec<Arc<CSIStorageCapacity>> {
    let mut kept = BTreeSet::new();
    let mut sorted: Vec<_> = existing.iter().filter(|o| is_managed(o, manager)).collect();
    sorted.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let goes = |object: &&&Arc<CSIStorageCapacity>| {
        let item = item_of(object);
        !(wanted.contains(&item) && kept.insert(item))
    };
    sorted.iter().filter(goes).map(|o| (*o).clone()).collect()
}

/// What there is no object of ours for.
pub fn missing(existing: &[Arc<CSIStorageCapacity>], wanted: BTreeSet<Item>, manager: &Manager) -> Vec<Item> {
    let known: BTreeSet<Item> = existing.iter().filter(|o| is_managed(o, manager)).map(|o| item_of(o)).collect();
    wanted.into_iter().filter(|item| !known.contains(item)).collect()
}

/// What the driver says is free, as quantities.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Free {
    pub capacity: Option<Quantity>,
    pub largest: Option<Quantity>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Nothing,
    Create(Box<CSIStorageCapacity>),
    Update(Box<CSIStorageCapacity>),
}

pub fn refreshed(item: &Item, existing: Option<&CSIStorageCapacity>, free: Free, manager: &Manager) -> Decision {
    let Some(existing) = existing else { return Decision::Create(Box::new(build(item, free, manager))) };
    let owned = manager
        .owner
        .as_ref()
        .is_none_or(|owner| existing.metadata.owner_references.iter().flatten().any(|o| o.uid == owner.uid));
    if owned && existing.capacity == free.capacity && existing.maximum_volume_size == free.largest {
        return Decision::Nothing;
    }
    let mut new = existing.clone();
    new.capacity = free.capacity;
    new.maximum_volume_size = free.largest;
    if !owned {
        new.metadata.owner_references = manager.owner.clone().map(|owner| vec![owner]);
    }
    Decision::Update(Box::new(new))
}

/// Its name follows from what it is about: made twice, it is there once.
fn build(item: &Item, free: Free, manager: &Manager) -> CSIStorageCapacity {
    let place: String = item.segment.iter().map(|(key, value)| format!("{key}={value},")).collect();
    let digest = sha256_hex(&format!("{}/{}/{}/{place}", manager.driver, manager.name, item.class));
    let labels = [(label::CAPACITY_DRIVER, &manager.driver), (label::CAPACITY_MANAGER, &manager.name)];
    CSIStorageCapacity {
        metadata: ObjectMeta {
            namespace: Some(manager.namespace.clone()),
            name: Some(format!("csisc-{}", &digest[..16])),
            labels: Some(labels.map(|(key, value)| (key.to_owned(), value.clone())).into()),
            owner_references: manager.owner.clone().map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        capacity: free.capacity,
        maximum_volume_size: free.largest,
        node_topology: Some(LabelSelector {
            match_labels: Some(item.segment.clone()).filter(|s| !s.is_empty()),
            match_expressions: None,
        }),
        storage_class_name: item.class.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::claim::WAIT_FOR_FIRST_CONSUMER;
    use cleat_testing::build::{self, DRIVER};

    fn manager() -> Manager {
        Manager { driver: DRIVER.to_owned(), namespace: "ns".to_owned(), name: "me".to_owned(), owner: None }
    }

    fn place(zone: &str) -> Segment {
        [("zone".to_owned(), zone.to_owned())].into()
    }

    fn item(class: &str, zone: &str) -> Item {
        Item { class: class.to_owned(), segment: place(zone) }
    }

    fn made(item: &Item) -> Arc<CSIStorageCapacity> {
        let Decision::Create(object) = refreshed(item, None, Free::default(), &manager()) else { panic!("not made") };
        Arc::new(*object)
    }

    #[test]
    fn there_is_one_for_each_waiting_class_in_each_place() {
        let node = |zone: Option<&str>| NodeSeen {
            keys: vec!["zone".to_owned()],
            labels: zone.map(place).unwrap_or_default(),
        };
        let places = segments(&[node(Some("a")), node(Some("b")), node(Some("a")), node(None)]);
        assert_eq!(places, [place("a"), place("b")].into());
        let keyless = NodeSeen { keys: Vec::new(), labels: place("a") };
        assert_eq!(segments(&[keyless]), [Segment::new()].into(), "a driver without topology is everywhere");
        let mut waiting = build::class("wait", DRIVER);
        waiting.volume_binding_mode = Some(WAIT_FOR_FIRST_CONSUMER.to_owned());
        let classes = [waiting, build::class("now", DRIVER), build::class("other", "other")].map(Arc::new);
        let names = |immediate| {
            let items = wanted(&classes, &[place("a")].into(), &manager(), immediate);
            items.into_iter().map(|i| i.class).collect::<Vec<_>>()
        };
        assert_eq!(names(false), ["wait"]);
        assert_eq!(names(true), ["now", "wait"]);
    }

    #[test]
    fn what_nobody_wants_goes_and_others_objects_stay() {
        let mut double = made(&item("wait", "a")).as_ref().clone();
        double.metadata.name = Some("zzz".to_owned());
        let mut foreign = made(&item("old", "a")).as_ref().clone();
        foreign.metadata.labels.as_mut().unwrap().insert(label::CAPACITY_MANAGER.to_owned(), "you".to_owned());
        let existing = [made(&item("wait", "a")), Arc::new(double), made(&item("old", "a")), Arc::new(foreign)];
        let others = [existing[3].clone()];
        assert_eq!(missing(&existing, [item("wait", "a"), item("wait", "b")].into(), &manager()), [item("wait", "b")]);
        assert_eq!(
            missing(&others, [item("old", "a")].into(), &manager()),
            [item("old", "a")],
            "another's is not ours"
        );
        let gone = surplus(&existing, &[item("wait", "a")].into(), &manager());
        let mut names: Vec<_> = gone.iter().map(|o| o.metadata.name.clone().unwrap()).collect();
        names.sort();
        let mut want = vec![existing[2].metadata.name.clone().unwrap(), "zzz".to_owned()];
        want.sort();
        assert_eq!(names, want);
    }

    #[test]
    fn an_object_is_written_only_when_something_changed() {
        let object = made(&item("wait", "a"));
        assert_eq!(item_of(&object), item("wait", "a"));
        let free = Free { capacity: Some(Quantity("5Gi".to_owned())), largest: None };
        let with_owner =
            Manager { owner: Some(OwnerReference { uid: "u".to_owned(), ..OwnerReference::default() }), ..manager() };
        let now = |free, manager: &Manager| refreshed(&item("wait", "a"), Some(&object), free, manager);
        assert_eq!(now(Free::default(), &manager()), Decision::Nothing);
        let Decision::Update(new) = now(free, &manager()) else { panic!("more is free") };
        assert_eq!(new.capacity.unwrap().0, "5Gi");
        let Decision::Update(new) = now(Free::default(), &with_owner) else { panic!("it has an owner now") };
        assert_eq!(new.metadata.owner_references.unwrap()[0].uid, "u");
    }
}
