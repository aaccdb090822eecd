//! Where the controllers' calls are carried out: off the async workers, with a deadline, one at a time per key.
use std::{sync::Arc, time::Duration};

use cleat_csi::InFlight;
use cleat_host::offload;
use tonic::Status;

use super::{
    failure::{Failure, offloaded},
    pools::Pools,
};

/// File operations; a copy may need longer, and then goes on while its caller is told to come back.
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub(crate) struct Worker {
    pools: Arc<Pools>,
    in_flight: InFlight,
}

impl Worker {
    pub(crate) fn new(pools: Arc<Pools>) -> Worker {
        Worker { pools, in_flight: InFlight::new() }
    }

    /// Refused while another call with this key is running.
    pub(crate) async fn alone<T: Send + 'static>(
        &self,
        what: &'static str,
        key: &str,
        work: impl FnOnce(&Pools) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Status> {
        let guard = self.in_flight.begin(key)?;
        let pools = Arc::clone(&self.pools);
        offload(DEADLINE, format!("{what} {key}"), move || {
            // Moved in: a caller that gives up must not let a second one in.
            let _guard = guard;
            work(&pools)
        })
        .await
        .map_err(offloaded)
    }

    pub(crate) async fn read<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Pools) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Status> {
        let pools = Arc::clone(&self.pools);
        offload(DEADLINE, what, move || work(&pools)).await.map_err(offloaded)
    }
}
