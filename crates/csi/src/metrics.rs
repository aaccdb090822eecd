//! The histogram of the duration of calls to drivers, by method and code. The component that serves `/metrics` registers it.
use std::{sync::OnceLock, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CallLabels {
    method_name: &'static str,
    grpc_status_code: &'static str,
}

type CallDurations = Family<CallLabels, Histogram, fn() -> Histogram>;

/// Seconds: from a call that the driver answers from memory to the formatting of a large volume.
const DURATION_BUCKETS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0];

fn call_durations() -> &'static CallDurations {
    static CALL_DURATIONS: OnceLock<CallDurations> = OnceLock::new();
    CALL_DURATIONS.get_or_init(|| CallDurations::new_with_constructor(|| Histogram::new(DURATION_BUCKETS)))
}

pub(crate) fn observe(method_name: &'static str, grpc_status_code: &'static str, duration: Duration) {
    call_durations().get_or_create(&CallLabels { method_name, grpc_status_code }).observe(duration.as_secs_f64());
}

/// Adds `csi_operations_seconds` to a registry. All clients of the process share this metric.
pub fn register(registry: &mut Registry) {
    registry.register_with_unit("csi_operations", "Calls to CSI drivers", Unit::Seconds, call_durations().clone());
}
