//! What one pod takes from a node, apart from claims: resources, host ports and inline disks. Pure.

use std::collections::BTreeMap;

use cleat_api::quantity::Quantity;
use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements, Volume};
use k8s_openapi::apimachinery::pkg::api::resource;

/// Amounts by resource name: cpu in millicores, memory and storage in bytes, everything else in units.
pub(super) type ResourceAmounts = BTreeMap<String, i64>;

const CPU: &str = "cpu";
const MEMORY: &str = "memory";
/// What a container without a request counts when nodes are scored.
const DEFAULT_CPU_MILLIS: i64 = 100;
const DEFAULT_MEMORY_BYTES: i64 = 200 << 20;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PodResources {
    pub(super) requests: ResourceAmounts,
    /// Millicores and bytes of memory, with defaults for containers without requests. Used for scores only.
    pub(super) nonzero_requests: (i64, i64),
    pub(super) ports: Vec<HostPort>,
    pub(super) disks: Vec<InlineDisk>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostPort {
    address: String,
    protocol: String,
    number: i32,
}

/// A cloud or network disk in the pod's spec. Two pods on one node can use the same disk only if both read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InlineDisk {
    id: String,
    read_only: bool,
}

impl PodResources {
    pub(super) fn of(pod: &Pod) -> Self {
        let Some(spec) = &pod.spec else { return Self::default() };
        let nonzero = |c: &Container| {
            let requests = requests_of(c.resources.as_ref());
            let or_default =
                |name: &str, default: i64| requests.get(name).copied().filter(|n| *n != 0).unwrap_or(default);
            (or_default(CPU, DEFAULT_CPU_MILLIS), or_default(MEMORY, DEFAULT_MEMORY_BYTES))
        };
        let ports = spec.containers.iter().flat_map(|c| c.ports.iter().flatten());
        Self {
            requests: pod_requests(pod),
            nonzero_requests: spec
                .containers
                .iter()
                .map(nonzero)
                .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)),
            ports: ports.filter_map(HostPort::of).collect(),
            disks: spec.volumes.iter().flatten().flat_map(inline_disks).collect(),
        }
    }
}

pub(super) fn amounts(list: Option<&BTreeMap<String, resource::Quantity>>) -> ResourceAmounts {
    let parsed = |(name, quantity): (&String, &resource::Quantity)| {
        let quantity: Quantity = quantity.0.parse().ok()?;
        Some((name.clone(), if name == CPU { quantity.to_millis() } else { quantity.to_bytes() }))
    };
    list.into_iter().flatten().filter_map(parsed).collect()
}

fn requests_of(resources: Option<&ResourceRequirements>) -> ResourceAmounts {
    amounts(resources.and_then(|r| r.requests.as_ref()))
}

/// The maximum over the pod's life: each init container in turn, beside the sidecars started before it, then all
/// containers and sidecars together.
fn pod_requests(pod: &Pod) -> ResourceAmounts {
    let Some(spec) = &pod.spec else { return ResourceAmounts::new() };
    let mut running = ResourceAmounts::new();
    let mut maximum = ResourceAmounts::new();
    for init in spec.init_containers.iter().flatten() {
        let mut during_init = requests_of(init.resources.as_ref());
        add(&mut during_init, &running);
        raise(&mut maximum, &during_init);
        if init.restart_policy.as_deref() == Some("Always") {
            add(&mut running, &requests_of(init.resources.as_ref()));
        }
    }
    for container in &spec.containers {
        add(&mut running, &requests_of(container.resources.as_ref()));
    }
    raise(&mut maximum, &running);
    // Requests of the whole pod replace the sum of its containers for the resources that they name.
    maximum.extend(requests_of(spec.resources.as_ref()));
    add(&mut maximum, &amounts(spec.overhead.as_ref()));
    maximum
}

pub(super) fn add(sum: &mut ResourceAmounts, more: &ResourceAmounts) {
    for (name, amount) in more {
        *sum.entry(name.clone()).or_default() += amount;
    }
}

pub(super) fn subtract(sum: &mut ResourceAmounts, less: &ResourceAmounts) {
    for (name, amount) in less {
        *sum.entry(name.clone()).or_default() -= amount;
    }
}

fn raise(maximum: &mut ResourceAmounts, amounts: &ResourceAmounts) {
    for (name, amount) in amounts {
        let maximum = maximum.entry(name.clone()).or_default();
        *maximum = (*maximum).max(*amount);
    }
}

impl HostPort {
    fn of(port: &k8s_openapi::api::core::v1::ContainerPort) -> Option<Self> {
        let number = port.host_port.filter(|number| *number > 0)?;
        Some(Self {
            address: port.host_ip.clone().filter(|ip| ip != "0.0.0.0").unwrap_or_default(),
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
            number,
        })
    }

    /// An empty address means all addresses.
    pub(super) fn conflicts_with(&self, other: &Self) -> bool {
        let same_address = self.address.is_empty() || other.address.is_empty() || self.address == other.address;
        self.number == other.number && self.protocol == other.protocol && same_address
    }
}

impl InlineDisk {
    pub(super) fn conflicts_with(&self, other: &Self) -> bool {
        self.id == other.id && !(self.read_only && other.read_only)
    }
}

fn inline_disks(volume: &Volume) -> Vec<InlineDisk> {
    let new_disk = |id: String, read_only: Option<bool>| InlineDisk { id, read_only: read_only.unwrap_or(false) };
    let mut found = Vec::new();
    if let Some(disk) = &volume.gce_persistent_disk {
        found.push(new_disk(format!("gce/{}", disk.pd_name), disk.read_only));
    }
    if let Some(disk) = &volume.aws_elastic_block_store {
        // An EBS disk conflicts with itself, even if both pods only read.
        found.push(new_disk(format!("aws/{}", disk.volume_id), None));
    }
    if let Some(disk) = &volume.iscsi {
        found.push(new_disk(format!("iscsi/{}", disk.iqn), disk.read_only));
    }
    if let Some(disk) = &volume.rbd {
        let (pool, image) = (disk.pool.as_deref().unwrap_or("rbd"), &disk.image);
        found.extend(disk.monitors.iter().map(|m| new_disk(format!("rbd/{m}/{pool}/{image}"), disk.read_only)));
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
    fn a_pod_requests_the_maximum_over_its_life() {
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
                "requests of the whole pod",
                json!({"containers": [container("1")], "resources": {"requests": {"cpu": "2"}}}),
                2000,
            ),
            ("no requests", json!({"containers": [{"name": "c"}]}), 0),
        ] {
            let resources = PodResources::of(&pod(spec));
            assert_eq!(resources.requests.get("cpu").copied().unwrap_or(0), want, "{case}");
        }
    }

    #[test]
    fn ports_conflict_on_the_same_address_and_protocol() {
        let port = |ip: &str, protocol: &str, number: i32| HostPort {
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
            assert_eq!(a.conflicts_with(&b), want, "{case}");
        }
    }

    #[test]
    fn disks_conflict_unless_both_pods_read() {
        let with =
            |volume: serde_json::Value| PodResources::of(&pod(json!({"containers": [], "volumes": [volume]}))).disks;
        let gce = |name: &str, read_only: bool| {
            with(json!({"name": "v", "gcePersistentDisk": {"pdName": name, "readOnly": read_only}}))
        };
        let aws = || with(json!({"name": "v", "awsElasticBlockStore": {"volumeID": "x", "readOnly": true}}));
        let rbd = |monitor: &str| with(json!({"name": "v", "rbd": {"monitors": ["m0", monitor], "image": "i"}}));
        for (case, a, b, want) in [
            ("a writer", gce("a", true), gce("a", false), true),
            ("two readers", gce("a", true), gce("a", true), false),
            ("two disks", gce("a", false), gce("b", false), false),
            ("a disk that is never shared", aws(), aws(), true),
            ("one monitor in common", rbd("m1"), rbd("m2"), true),
        ] {
            assert_eq!(a.iter().any(|a| b.iter().any(|b| a.conflicts_with(b))), want, "{case}");
        }
    }
}
