//! What one pod asks of a node, apart from claims: resources, ports and disks. Pure.

use std::collections::BTreeMap;

use cleat_api::quantity::Quantity;
use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements, Volume};
use k8s_openapi::apimachinery::pkg::api::resource;

/// Amounts by resource: thousandths of a cpu, whole units of everything else.
pub(super) type Amounts = BTreeMap<String, i64>;

const CPU: &str = "cpu";
const MEMORY: &str = "memory";
/// What a container that asks for nothing is taken to use when nodes are compared.
const USUAL_CPU: i64 = 100;
const USUAL_MEMORY: i64 = 200 << 20;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    pub(super) requests: Amounts,
    /// Cpu and memory with the usual amounts where nothing is asked for.
    pub(super) usual: (i64, i64),
    pub(super) ports: Vec<Port>,
    pub(super) disks: Vec<Disk>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Port {
    address: String,
    protocol: String,
    number: i32,
}

/// A cloud or network disk that a pod names itself; two pods of a node share it only if both read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    id: String,
    read_only: bool,
}

impl Demand {
    pub(super) fn of(pod: &Pod) -> Self {
        let Some(spec) = &pod.spec else { return Self::default() };
        let usual = |c: &Container| {
            let requests = asked(c.resources.as_ref());
            let or = |name: &str, usual: i64| requests.get(name).copied().filter(|n| *n != 0).unwrap_or(usual);
            (or(CPU, USUAL_CPU), or(MEMORY, USUAL_MEMORY))
        };
        let ports = spec.containers.iter().flat_map(|c| c.ports.iter().flatten());
        Self {
            requests: requests(pod),
            usual: spec.containers.iter().map(usual).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)),
            ports: ports.filter_map(Port::of).collect(),
            disks: spec.volumes.iter().flatten().flat_map(disks).collect(),
        }
    }
}

pub(super) fn amounts(list: Option<&BTreeMap<String, resource::Quantity>>) -> Amounts {
    let parsed = |(name, text): (&String, &resource::Quantity)| {
        let quantity: Quantity = text.0.parse().ok()?;
        Some((name.clone(), if name == CPU { quantity.to_millis() } else { quantity.to_bytes() }))
    };
    list.into_iter().flatten().filter_map(parsed).collect()
}

fn asked(resources: Option<&ResourceRequirements>) -> Amounts {
    amounts(resources.and_then(|r| r.requests.as_ref()))
}

/// The most that runs at a time: init containers one after another, beside those that keep running, then all
/// containers together.
fn requests(pod: &Pod) -> Amounts {
    let Some(spec) = &pod.spec else { return Amounts::new() };
    let mut staying = Amounts::new();
    let mut most = Amounts::new();
    for init in spec.init_containers.iter().flatten() {
        let mut now = asked(init.resources.as_ref());
        add(&mut now, &staying);
        raise(&mut most, &now);
        if init.restart_policy.as_deref() == Some("Always") {
            add(&mut staying, &asked(init.resources.as_ref()));
        }
    }
    for container in &spec.containers {
        add(&mut staying, &asked(container.resources.as_ref()));
    }
    raise(&mut most, &staying);
    // Set for the whole pod, they stand for the sum of its containers.
    most.extend(asked(spec.resources.as_ref()));
    add(&mut most, &amounts(spec.overhead.as_ref()));
    most
}

pub(super) fn add(sum: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        *sum.entry(name.clone()).or_default() += amount;
    }
}

pub(super) fn subtract(sum: &mut Amounts, less: &Amounts) {
    for (name, amount) in less {
        *sum.entry(name.clone()).or_default() -= amount;
    }
}

fn raise(most: &mut Amounts, to: &Amounts) {
    for (name, amount) in to {
        let most = most.entry(name.clone()).or_default();
        *most = (*most).max(*amount);
    }
}

impl Port {
    fn of(port: &k8s_openapi::api::core::v1::ContainerPort) -> Option<Self> {
        let number = port.host_port.filter(|number| *number > 0)?;
        Some(Self {
            address: port.host_ip.clone().filter(|ip| ip != "0.0.0.0").unwrap_or_default(),
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
            number,
        })
    }

    /// No address is every address.
    pub(super) fn conflicts(&self, other: &Self) -> bool {
        let same_address = self.address.is_empty() || other.address.is_empty() || self.address == other.address;
        self.number == other.number && self.protocol == other.protocol && same_address
    }
}

impl Disk {
    pub(super) fn conflicts(&self, other: &Self) -> bool {
        self.id == other.id && !(self.read_only && other.read_only)
    }
}

fn disks(volume: &Volume) -> Vec<Disk> {
    let one = |id: String, read_only: Option<bool>| Disk { id, read_only: read_only.unwrap_or(false) };
    let mut found = Vec::new();
    if let Some(disk) = &volume.gce_persistent_disk {
        found.push(one(format!("gce/{}", disk.pd_name), disk.read_only));
    }
    if let Some(disk) = &volume.aws_elastic_block_store {
        // Such a disk is attached for one pod, whatever it does with it.
        found.push(one(format!("aws/{}", disk.volume_id), None));
    }
    if let Some(disk) = &volume.iscsi {
        found.push(one(format!("iscsi/{}", disk.iqn), disk.read_only));
    }
    if let Some(disk) = &volume.rbd {
        let (pool, image) = (disk.pool.as_deref().unwrap_or("rbd"), &disk.image);
        found.extend(disk.monitors.iter().map(|m| one(format!("rbd/{m}/{pool}/{image}"), disk.read_only)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;
    use serde_json::json;

    fn pod(spec: serde_json::Value) -> Pod {
        let mut pod = build::pod("ns", "p", "", &[]);
        pod.spec = Some(serde_json::from_value(spec).unwrap());
        pod
    }

    #[test]
    fn a_pod_asks_for_the_most_it_ever_uses() {
        let container = |cpu: &str| json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
        let sidecar =
            |cpu: &str| json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": cpu}}});
        for (case, spec, want) in [
            ("containers add up", json!({"containers": [container("1"), container("500m")]}), 1500),
            (
                "a large init container",
                json!({"initContainers": [container("3")], "containers": [container("1")]}),
                3000,
            ),
            (
                "a small init container",
                json!({"initContainers": [container("100m")], "containers": [container("1")]}),
                1000,
            ),
            (
                "a sidecar runs beside both",
                json!({"initContainers": [sidecar("1"), container("3")], "containers": [container("1")]}),
                4000,
            ),
            (
                "a sidecar runs beside the containers",
                json!({"initContainers": [sidecar("1")], "containers": [container("2")]}),
                3000,
            ),
            ("overhead is added", json!({"containers": [container("1")], "overhead": {"cpu": "10m"}}), 1010),
            (
                "the pod's own figure counts",
                json!({"containers": [container("1")], "resources": {"requests": {"cpu": "2"}}}),
                2000,
            ),
            ("nothing", json!({"containers": [{"name": "c"}]}), 0),
        ] {
            let demand = Demand::of(&pod(spec));
            assert_eq!(demand.requests.get("cpu").copied().unwrap_or(0), want, "{case}");
        }
    }

    #[test]
    fn ports_conflict_on_the_same_address_and_protocol() {
        let port = |ip: &str, protocol: &str, number: i32| Port {
            address: ip.to_owned(),
            protocol: protocol.to_owned(),
            number,
        };
        for (case, a, b, want) in [
            ("same", port("", "TCP", 80), port("", "TCP", 80), true),
            ("every address", port("", "TCP", 80), port("10.0.0.1", "TCP", 80), true),
            ("different addresses", port("10.0.0.2", "TCP", 80), port("10.0.0.1", "TCP", 80), false),
            ("different protocols", port("", "UDP", 80), port("", "TCP", 80), false),
            ("different ports", port("", "TCP", 81), port("", "TCP", 80), false),
        ] {
            assert_eq!(a.conflicts(&b), want, "{case}");
        }
    }

    #[test]
    fn disks_are_shared_by_readers_only() {
        let with = |volume: serde_json::Value| Demand::of(&pod(json!({"containers": [], "volumes": [volume]}))).disks;
        let gce = |name: &str, read_only: bool| {
            with(json!({"name": "v", "gcePersistentDisk": {"pdName": name, "readOnly": read_only}}))
        };
        let aws = || with(json!({"name": "v", "awsElasticBlockStore": {"volumeID": "x", "readOnly": true}}));
        let rbd = |monitor: &str| with(json!({"name": "v", "rbd": {"monitors": ["m0", monitor], "image": "i"}}));
        for (case, a, b, want) in [
            ("a writer", gce("a", true), gce("a", false), true),
            ("two readers", gce("a", true), gce("a", true), false),
            ("two disks", gce("a", false), gce("b", false), false),
            ("one that is never shared", aws(), aws(), true),
            ("one monitor in common", rbd("m1"), rbd("m2"), true),
        ] {
            assert_eq!(a.iter().any(|a| b.iter().any(|b| a.conflicts(b))), want, "{case}");
        }
    }
}
