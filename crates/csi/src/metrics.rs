//! How the calls to drivers went: one histogram by method and code. Counts only; whoever serves `/metrics` registers it.
use std::{sync::OnceLock, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Call {
    method_name: &'static str,
    grpc_status_code: &'static str,
}

type Calls = Family<Call, Histogram, fn() -> Histogram>;

/// From a call answered from memory to a format of a large volume.
const BOUNDS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0];

fn calls() -> &'static Calls {
    static CALLS: OnceLock<Calls> = OnceLock::new();
    CALLS.get_or_init(|| Calls::new_with_constructor(|| Histogram::new(BOUNDS)))
}

pub(crate) fn observe(method_name: &'static str, grpc_status_code: &'static str, duration: Duration) {
    calls().get_or_create(&Call { method_name, grpc_status_code }).observe(duration.as_secs_f64());
}

/// Adds `csi_operations_seconds` to a registry. All clients of the process share it.
pub fn register(registry: &mut Registry) {
    registry.register_with_unit("csi_operations", "Calls to CSI drivers", Unit::Seconds, calls().clone());
}
