//! Metrics of work queues and reconciles, shared by all controllers of a process.
//!
//! The component that serves `/metrics` calls [`register`].

use std::sync::OnceLock;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ControllerLabel {
    name: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReconcileLabels {
    name: &'static str,
    result: &'static str,
}

type Histograms = Family<ControllerLabel, Histogram, fn() -> Histogram>;

/// Upper bounds of the histogram buckets: from a reconcile that found nothing to do, to a call that reached its deadline.
const BUCKET_SECONDS: [f64; 12] = [0.00005, 0.0002, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0];

struct WorkqueueMetrics {
    depth: Family<ControllerLabel, Gauge>,
    queue_duration: Histograms,
    work_duration: Histograms,
    reconciles: Family<ReconcileLabels, Counter>,
    retries: Family<ControllerLabel, Counter>,
}

fn metrics() -> &'static WorkqueueMetrics {
    static METRICS: OnceLock<WorkqueueMetrics> = OnceLock::new();
    METRICS.get_or_init(|| WorkqueueMetrics {
        depth: Family::default(),
        queue_duration: Histograms::new_with_constructor(|| Histogram::new(BUCKET_SECONDS)),
        work_duration: Histograms::new_with_constructor(|| Histogram::new(BUCKET_SECONDS)),
        reconciles: Family::default(),
        retries: Family::default(),
    })
}

pub fn register(registry: &mut Registry) {
    let m = metrics();
    registry.register("workqueue_depth", "Keys that wait in the queue", m.depth.clone());
    registry.register_with_unit(
        "workqueue_queue_duration",
        "How long keys waited in the queue",
        Unit::Seconds,
        m.queue_duration.clone(),
    );
    registry.register_with_unit(
        "workqueue_work_duration",
        "How long reconciles took",
        Unit::Seconds,
        m.work_duration.clone(),
    );
    registry.register("workqueue_reconciles", "Reconciles by result", m.reconciles.clone());
    registry.register("workqueue_retries", "Reconciles that did not succeed and are repeated", m.retries.clone());
}

/// The metrics of one controller, looked up once.
#[derive(Clone)]
pub(crate) struct ControllerMetrics {
    depth: Gauge,
    queue_duration: Histogram,
    work_duration: Histogram,
    retries: Counter,
    done: Counter,
    failed: Counter,
    conflicted: Counter,
    overloaded: Counter,
}

#[derive(Clone, Copy)]
pub(crate) enum ReconcileResult {
    Done,
    Conflicted,
    Overloaded,
    Failed,
}

impl ControllerMetrics {
    pub(crate) fn of(name: &'static str) -> Self {
        let m = metrics();
        let label = ControllerLabel { name };
        let reconciles = |result| m.reconciles.get_or_create(&ReconcileLabels { name, result }).clone();
        Self {
            depth: m.depth.get_or_create(&label).clone(),
            queue_duration: m.queue_duration.get_or_create(&label).clone(),
            work_duration: m.work_duration.get_or_create(&label).clone(),
            retries: m.retries.get_or_create(&label).clone(),
            done: reconciles("done"),
            failed: reconciles("failed"),
            conflicted: reconciles("conflict"),
            overloaded: reconciles("overload"),
        }
    }

    pub(crate) fn reconcile_started(&self, waited: Duration, depth: usize) {
        self.depth.set(i64::try_from(depth).unwrap_or(i64::MAX));
        self.queue_duration.observe(waited.as_secs_f64());
    }

    pub(crate) fn reconcile_ended(&self, result: ReconcileResult, duration: Duration) {
        self.work_duration.observe(duration.as_secs_f64());
        match result {
            ReconcileResult::Done => &self.done,
            ReconcileResult::Conflicted => &self.conflicted,
            ReconcileResult::Overloaded => &self.overloaded,
            ReconcileResult::Failed => &self.failed,
        }
        .inc();
        if !matches!(result, ReconcileResult::Done) {
            self.retries.inc();
        }
    }
}
