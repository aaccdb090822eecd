//! What the server counts, in the text form Prometheus reads.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cleat_store::Range;
use cleat_store::embedded::StoreStatistics;
use http::StatusCode;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use cleat_auth::request_info::RequestInfo;
use cleat_registry::catalog::Kinds;

pub(crate) const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const BUCKETS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    verb: &'static str,
    group: String,
    resource: String,
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct About {
    verb: &'static str,
    group: String,
    resource: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    group: String,
    resource: String,
}

type Histograms = Family<About, Histogram, fn() -> Histogram>;

pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    durations: Histograms,
    watchers: Family<Of, Gauge>,
    objects: Family<Of, Gauge>,
    store: Arc<StoreStatistics>,
}

/// Counts a running watch until it is dropped.
pub(crate) struct Watching(Gauge);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Metrics {
    pub(crate) fn new(store: Arc<StoreStatistics>, more: &[fn(&mut Registry)]) -> Self {
        let mut registry = Registry::default();
        more.iter().for_each(|register| register(&mut registry));
        let requests = Family::default();
        let durations: Histograms = Family::new_with_constructor(|| Histogram::new(BUCKETS));
        let (watchers, objects) = (Family::default(), Family::default());
        registry.register("apiserver_request", "Requests answered", requests.clone());
        registry.register("apiserver_request_duration_seconds", "Time to answer, but for watches", durations.clone());
        registry.register("apiserver_watchers", "Watches running", watchers.clone());
        registry.register("apiserver_storage_objects", "Objects stored", objects.clone());
        registry.register_collector(Box::new(Store(store.clone())));
        Self { registry, requests, durations, watchers, objects, store }
    }

    pub(crate) fn answered(&self, asked: &RequestInfo, code: StatusCode, took: Duration) {
        let (group, resource) = asked.labels();
        let (verb, code) = (asked.verb, code.as_u16());
        let (group, resource) = if verb == "watch" {
            (group, resource)
        } else {
            let about = About { verb, group, resource };
            self.durations.get_or_create(&about).observe(took.as_secs_f64());
            (about.group, about.resource)
        };
        self.requests.get_or_create(&Answered { verb, group, resource, code }).inc();
    }

    pub(crate) fn watching(&self, asked: &RequestInfo) -> Watching {
        let (group, resource) = asked.labels();
        let gauge = self.watchers.get_or_create(&Of { group, resource }).clone();
        gauge.inc();
        Watching(gauge)
    }

    /// Did the store's last commit succeed?
    pub(crate) fn store_is_writable(&self) -> bool {
        !self.store.failing.load(Ordering::Relaxed)
    }

    /// Everything, as of now.
    pub(crate) async fn text(&self, store: &dyn cleat_store::Store, kinds: &Kinds) -> Result<String, fmt::Error> {
        for kind in kinds.iter() {
            let d = kind.descriptor();
            let prefix = d.prefix(None);
            if let Ok(found) = store.list(Range { prefix: &prefix, ..Range::default() }).await {
                let of = Of { group: d.group.clone(), resource: d.plural.clone() };
                self.objects.get_or_create(&of).set(i64::try_from(found.stored.len()).unwrap_or(i64::MAX));
            }
        }
        let mut out = String::new();
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

/// The store counts for itself.
#[derive(Debug)]
struct Store(Arc<StoreStatistics>);

impl Collector for Store {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        for (name, help, value) in [
            ("cleat_store_commits", "Batches made durable", load(&self.0.commits)),
            ("cleat_store_writes", "Writes made durable", load(&self.0.writes)),
            ("cleat_store_failures", "Batches that could not be made durable", load(&self.0.failures)),
            ("cleat_store_checkpoints", "Times the log was taken into the file", load(&self.0.checkpoints)),
            ("cleat_store_checkpoint_failures", "Times it could not be", load(&self.0.checkpoint_failures)),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        let buckets: Vec<(f64, u64)> = self
            .0
            .batch_sizes()
            .map(|(limit, count)| {
                (limit.map_or(f64::INFINITY, |l| f64::from(u32::try_from(l).unwrap_or(u32::MAX))), count)
            })
            .collect();
        let (writes, commits) = (load(&self.0.writes), load(&self.0.commits));
        let name = "cleat_store_batch_size";
        let mut metric = encoder.encode_descriptor(name, "Writes that shared one sync", None, MetricType::Histogram)?;
        #[allow(clippy::cast_precision_loss)]
        metric.encode_histogram::<NoLabelSet>(writes as f64, commits, &buckets, None)
    }
}
