//! The agent: prepares its directory, wires the parts, and runs them from start to stop. No module imports it, and it
//! makes no decisions about volumes.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::Key;
use cleat_api::key::Meta as _;
use cleat_host::{OffloadError, mount, offload};
use cleat_runtime::Client;
use cleat_runtime::work::work;
use cleat_runtime::{Caches, Clock, Outcome, SystemClock};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::context::{AgentContext, ObjectKey};
use crate::error::ReconcileError;
use crate::layout::{FILE_TIMEOUT, Layout, VolumeId, make_dir};
use crate::reconstruct::{ReconstructError, ReconstructedState, reconstruct};
use crate::registration::RegistrationError;
use crate::{node_status, pods, registration, subscriptions, volumes};

/// Enough to list a node full of volumes on a busy disk.
const RECONSTRUCT_TIMEOUT: Duration = Duration::from_secs(300);
/// A reconcile of a volume mostly waits for its driver. The limit is high so that volumes whose drivers hang do not
/// delay others.
const MAX_CONCURRENT_VOLUMES: usize = 256;
const MAX_CONCURRENT_OBJECTS: usize = 32;
/// How long a stop waits for driver calls. After that it is safe to leave them: their records are on disk.
const STOP_GRACE_PERIOD: Duration = Duration::from_secs(10);
const MIN_REGISTER_BACKOFF: Duration = Duration::from_millis(50);
const MAX_REGISTER_BACKOFF: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct Config {
    /// The name of the Node.
    pub name: String,
    /// The kubelet's root directory; absolute. `/var/lib/kubelet` on a real node.
    pub root: PathBuf,
    /// Make the root a shared mount, for drivers that run in containers.
    pub share_root: bool,
}

impl Config {
    pub fn new(name: impl Into<String>, root: impl Into<PathBuf>) -> Config {
        Config { name: name.into(), root: root.into(), share_root: false }
    }
}

/// The node agent could not start or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("the root directory {0:?} is not absolute")]
    RelativeRoot(PathBuf),
    #[error("prepare {dir:?}: {source}")]
    Prepare { dir: PathBuf, source: OffloadError<io::Error> },
    #[error("share {dir:?}: {source}")]
    Share { dir: PathBuf, source: OffloadError<mount::MountError> },
    #[error("find what is mounted: {0}")]
    Reconstruct(#[source] OffloadError<ReconstructError>),
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

/// The node agent of one node. Several agents with different names and roots may share a process and its caches.
pub struct Agent {
    config: Config,
    client: Client,
    caches: Caches,
    clock: Arc<dyn Clock>,
}

impl Agent {
    pub fn new(config: Config, client: Client, caches: Caches) -> Agent {
        Agent { config, client, caches, clock: Arc::new(SystemClock) }
    }

    #[must_use]
    pub fn with_clock(self, clock: Arc<dyn Clock>) -> Agent {
        Agent { clock, ..self }
    }

    /// Runs until `stop`. Steps in progress then have [`STOP_GRACE_PERIOD`] to finish; mounted volumes stay mounted.
    pub async fn run(self, stop: CancellationToken) -> Result<(), AgentError> {
        // A child token: an agent that fails stops its own parts, not the other holders of the caller's token.
        let stop = stop.child_token();
        // Boxed because the joined futures of all parts are large.
        Box::pin(self.run_until(stop)).await
    }

    async fn run_until(self, stop: CancellationToken) -> Result<(), AgentError> {
        let layout = prepare(&self.config).await?;
        let reconstructed = offload(RECONSTRUCT_TIMEOUT, "find what is mounted", {
            let layout = layout.clone();
            move || reconstruct(&layout)
        });
        let reconstructed = reconstructed.await.map_err(AgentError::Reconstruct)?;
        let Agent { config, client, caches, clock } = self;
        let agent = Arc::new(AgentContext::new(config.name, layout, client, &caches, clock, stop.clone()));
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = initialize(&agent, reconstructed) => {}
        }
        subscriptions::subscribe(&agent);
        info!(node = agent.name, root = ?agent.layout.root(), "node agent started");
        let objects = work("node", agent.object_queue.clone(), MAX_CONCURRENT_OBJECTS, stop.clone(), {
            let agent = agent.clone();
            move |key: ObjectKey| reconcile_object(agent.clone(), key)
        });
        let volumes = work("volume", agent.volume_queue.clone(), MAX_CONCURRENT_VOLUMES, stop.clone(), {
            let agent = agent.clone();
            move |id: VolumeId| volumes::reconcile(agent.clone(), id)
        });
        let registration = async {
            let result = registration::run(agent.clone()).await;
            if result.is_err() {
                // Without registration no volume can be mounted: the whole agent stops and returns the error.
                stop.cancel();
            }
            result
        };
        let all = async { tokio::join!(registration, objects, volumes, node_status::renew_lease(&agent)).0 };
        let grace_period_over = async {
            stop.cancelled().await;
            tokio::time::sleep(STOP_GRACE_PERIOD).await;
        };
        let registered = tokio::select! {
            registered = all => registered,
            () = grace_period_over => {
                warn!(node = agent.name, "node agent stopped while driver calls were in progress");
                Ok(())
            }
        };
        info!(node = agent.name, "node agent stopped");
        Ok(registered?)
    }
}

async fn prepare(config: &Config) -> Result<Layout, AgentError> {
    if !config.root.is_absolute() {
        return Err(AgentError::RelativeRoot(config.root.clone()));
    }
    let root = config.root.clone();
    let created = offload(FILE_TIMEOUT, "make the root directory", move || {
        let layout = Layout::new(&root);
        for dir in [layout.pods_dir(), layout.plugins_dir(), layout.plugins_registry_dir()] {
            make_dir(&dir)?;
        }
        // Paths in the mount table contain no symbolic links.
        root.canonicalize()
    });
    let root = created.await.map_err(|source| AgentError::Prepare { dir: config.root.clone(), source })?;
    if config.share_root {
        let dir = root.clone();
        let shared = offload(FILE_TIMEOUT, "share the root directory", move || mount::share(&dir)).await;
        shared.map_err(|source| AgentError::Share { dir: root.clone(), source })?;
    }
    Ok(Layout::new(root))
}

async fn reconcile_object(agent: Arc<AgentContext>, key: ObjectKey) -> Result<Outcome, ReconcileError> {
    match key {
        ObjectKey::Node => Box::pin(node_status::reconcile(agent)).await,
        ObjectKey::Pod(uid) => Box::pin(pods::reconcile(agent, uid)).await,
    }
}

/// Builds the state before anything is mounted or unmounted, in this order: the reconstructed volumes, the synced
/// caches, the desired volumes of every pod. Then it registers the node, which reports all of them as in use.
async fn initialize(agent: &AgentContext, reconstructed: ReconstructedState) {
    let has_unreadable = !reconstructed.unreadable.is_empty();
    agent.state.lock().load_reconstructed(reconstructed.volumes, &agent.name);
    agent.wait_for_caches().await;
    if has_unreadable && let Some(node) = agent.nodes.named(&agent.name) {
        let _ = agent.retained_in_use.set(node_status::volumes_in_use(&node));
    }
    for pod in agent.pods.all().iter().filter(|p| agent.is_on_this_node(p)) {
        let uid = pod.metadata.uid().to_owned();
        agent.state.lock().pod_keys.insert(uid.clone(), Key::of(&pod.metadata));
        pods::observe(agent, &uid);
    }
    let mut backoff = MIN_REGISTER_BACKOFF;
    while let Err(error) = node_status::register(agent).await {
        warn!(%error, "node registration failed; it will be repeated");
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_REGISTER_BACKOFF);
    }
    let (pods, volumes) = {
        let state = agent.state.lock();
        (state.all_pods(), state.all_volumes())
    };
    pods.into_iter().for_each(|uid| agent.wake_pod(uid));
    volumes.into_iter().for_each(|id| agent.wake_volume(id));
}
