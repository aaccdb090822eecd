//! Runs the calls of the controller services: off the async workers and with a deadline. Calls that change something
//! exclude each other by key.
use std::{sync::Arc, time::Duration};

use cleat_csi::InFlight;
use cleat_host::offload;
use tonic::Status;

use super::{
    failure::{Failure, offload_status},
    pools::Pools,
};

/// Enough for file operations. A copy may take longer: it continues, and the caller gets DEADLINE_EXCEEDED and repeats
/// the call.
const CALL_DEADLINE: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub(crate) struct Worker {
    pools: Arc<Pools>,
    in_flight: InFlight,
}

impl Worker {
    pub(crate) fn new(pools: Arc<Pools>) -> Worker {
        Worker { pools, in_flight: InFlight::new() }
    }

    /// Runs `work`. Fails if another call with the same key is running.
    pub(crate) async fn run_exclusive<T: Send + 'static>(
        &self,
        what: &'static str,
        key: &str,
        work: impl FnOnce(&Pools) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Status> {
        let guard = self.in_flight.begin(key)?;
        let pools = Arc::clone(&self.pools);
        offload(CALL_DEADLINE, format!("{what} {key}"), move || {
            // The thread owns the guard: after the deadline the work is still running, and must keep its key.
            let _guard = guard;
            work(&pools)
        })
        .await
        .map_err(offload_status)
    }

    /// Runs `work`, which must not change anything, beside other calls.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Pools) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Status> {
        let pools = Arc::clone(&self.pools);
        offload(CALL_DEADLINE, what, move || work(&pools)).await.map_err(offload_status)
    }
}
