//! The agent itself: its parts, what wakes them, and its life from start to stop. Decides nothing about volumes.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use cleat_api::key::Meta as _;
use cleat_api::{Key, names, pod as api_pod};
use cleat_host::{OffloadError, mount, offload};
use cleat_runtime::work::{Severity, work};
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Cache, Caches, Change, Clock, Outcome, Queue, Recorder, SystemClock};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::Client;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::drivers::Drivers;
use crate::layout::{Layout, PodUid, VolumeId, make_dir};
use crate::reconstruct::{Found, ReconstructError, reconstruct};
use crate::registration::RegistrationError;
use crate::registry::RegistryError;
use crate::state::State;
use crate::{pods, registration, status, volumes};

/// A local file system that needs longer for a directory is in trouble.
pub(crate) const FILES: Duration = Duration::from_secs(30);
/// Listing a node full of volumes, on a busy disk.
const RECONSTRUCT: Duration = Duration::from_secs(300);
/// Volumes are waited for, not worked on: many at once cost little, and one that hangs must not hold up another.
const VOLUMES_AT_ONCE: usize = 256;
const OBJECTS_AT_ONCE: usize = 32;
/// How long a stop waits for calls under way. Whatever they were about is recorded on disk, so leaving them is safe.
const SEE_THROUGH: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct Config {
    /// The name of the Node object.
    pub name: String,
    /// The kubelet's root directory; absolute. `/var/lib/kubelet` on a real node.
    pub root: PathBuf,
    /// Make the root a shared mount, for drivers that live in containers.
    pub share_root: bool,
}

impl Config {
    pub fn new(name: impl Into<String>, root: impl Into<PathBuf>) -> Config {
        Config { name: name.into(), root: root.into(), share_root: false }
    }
}

/// The node agent could not start or had to give up.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("the root directory {0:?} is not absolute")]
    Relative(PathBuf),
    #[error("prepare {dir:?}: {source}")]
    Prepare { dir: PathBuf, source: OffloadError<io::Error> },
    #[error("share {dir:?}: {source}")]
    Share { dir: PathBuf, source: OffloadError<mount::MountError> },
    #[error("find what is mounted: {0}")]
    Reconstruct(#[source] OffloadError<ReconstructError>),
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

/// A visit to a pod, a volume or the node failed and will be repeated.
#[derive(Debug, thiserror::Error)]
pub enum TurnError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error("{0}")]
    Steps(String),
    #[error("pod {0} is on the server but not in the cache yet")]
    CacheBehind(Key),
    #[error("{what} {key}: {source}")]
    Api { what: &'static str, key: Key, source: Box<kube::Error> },
    #[error("directories of pod {uid}: {source}")]
    Directories { uid: PodUid, source: OffloadError<io::Error> },
}

impl From<&TurnError> for Severity {
    fn from(error: &TurnError) -> Severity {
        match error {
            TurnError::Write(error) => error.into(),
            TurnError::CacheBehind(_) => Severity::Expected,
            TurnError::Steps(_) | TurnError::Registry(_) | TurnError::Api { .. } | TurnError::Directories { .. } => {
                Severity::Warning
            }
        }
    }
}

/// The node agent of one node. Several with different names and roots may share a process and its caches.
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

    /// Runs until `stop`; steps under way are seen through, and what is mounted stays mounted.
    pub async fn run(self, stop: CancellationToken) -> Result<(), AgentError> {
        // An agent that gives up ends itself, and nobody else who shares the token.
        let stop = stop.child_token();
        // Boxed: the futures of all parts together are large, and the caller should not have to know.
        Box::pin(self.live(stop)).await
    }

    async fn live(self, stop: CancellationToken) -> Result<(), AgentError> {
        let layout = prepare(&self.config).await?;
        let found = offload(RECONSTRUCT, "find what is mounted", {
            let layout = layout.clone();
            move || reconstruct(&layout)
        });
        let found = found.await.map_err(AgentError::Reconstruct)?;
        let shared = self.assemble(layout, stop.clone());
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = shared.start(found) => {}
        }
        shared.subscribe();
        info!(node = shared.name, root = ?shared.layout.root(), "node agent runs");
        let objects = work("node", shared.objects.clone(), OBJECTS_AT_ONCE, stop.clone(), {
            let shared = shared.clone();
            move |key: Object| visit(shared.clone(), key)
        });
        let volumes = work("volume", shared.work.clone(), VOLUMES_AT_ONCE, stop.clone(), {
            let shared = shared.clone();
            move |id: VolumeId| volumes::turn(shared.clone(), id)
        });
        let registration = async {
            let result = registration::run(shared.clone()).await;
            if result.is_err() {
                // Without registration nothing can be mounted: the whole agent ends, and says why.
                stop.cancel();
            }
            result
        };
        let all = async { tokio::join!(registration, objects, volumes, status::heartbeat(&shared)).0 };
        let late = async {
            stop.cancelled().await;
            tokio::time::sleep(SEE_THROUGH).await;
        };
        let registered = tokio::select! {
            registered = all => registered,
            () = late => {
                warn!(node = shared.name, "stopped while calls to drivers are under way");
                Ok(())
            }
        };
        info!(node = shared.name, "node agent stopped");
        Ok(registered?)
    }

    fn assemble(self, layout: Layout, stop: CancellationToken) -> Arc<Shared> {
        Arc::new(Shared {
            name: self.config.name,
            layout,
            pods: self.caches.pods(),
            nodes: self.caches.nodes(),
            claims: self.caches.claims(),
            volumes: self.caches.volumes(),
            csi_drivers: self.caches.csi_drivers(),
            attachments: self.caches.attachments(),
            state: Mutex::default(),
            drivers: Drivers::default(),
            registry: tokio::sync::Mutex::default(),
            registered: Mutex::default(),
            carried: OnceLock::new(),
            objects: Queue::new(Backoff::new(Duration::from_millis(5), Duration::from_secs(30))),
            work: Queue::new(Backoff::new(Duration::from_millis(200), Duration::from_secs(120))),
            recorder: Recorder::new(self.client.clone(), "kubelet", self.clock.clone()),
            client: self.client,
            clock: self.clock,
            stop,
        })
    }
}

async fn prepare(config: &Config) -> Result<Layout, AgentError> {
    if !config.root.is_absolute() {
        return Err(AgentError::Relative(config.root.clone()));
    }
    let root = config.root.clone();
    let made = offload(FILES, "make the root directory", move || {
        let made = Layout::new(&root);
        for dir in [made.pods(), made.plugins(), made.plugins_registry()] {
            make_dir(&dir)?;
        }
        // The mount table knows no symbolic links.
        root.canonicalize()
    });
    let root = made.await.map_err(|source| AgentError::Prepare { dir: config.root.clone(), source })?;
    if config.share_root {
        let dir = root.clone();
        let shared = offload(FILES, "share the root directory", move || mount::share(&dir)).await;
        shared.map_err(|source| AgentError::Share { dir: root.clone(), source })?;
    }
    Ok(Layout::new(root))
}

/// What the queue of API objects holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Object {
    Node,
    Pod(PodUid),
}

async fn visit(shared: Arc<Shared>, object: Object) -> Result<Outcome, TurnError> {
    match object {
        Object::Node => Box::pin(status::turn(shared)).await,
        Object::Pod(uid) => Box::pin(pods::turn(shared, uid)).await,
    }
}

/// What all parts of one agent share. The state's lock is never held while a cache is read: a cache tells its subscribers under
/// its own lock, and they take this one.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) layout: Layout,
    pub(crate) client: Client,
    pub(crate) pods: Cache<Pod>,
    pub(crate) nodes: Cache<Node>,
    pub(crate) claims: Cache<PersistentVolumeClaim>,
    pub(crate) volumes: Cache<PersistentVolume>,
    pub(crate) csi_drivers: Cache<CSIDriver>,
    pub(crate) attachments: Cache<VolumeAttachment>,
    pub(crate) state: Mutex<State>,
    pub(crate) drivers: Drivers,
    /// The uid of the Node object that has everything of ours: labels, status, drivers.
    pub(crate) registered: Mutex<Option<String>>,
    /// Held while a driver's entry is written.
    pub(crate) registry: tokio::sync::Mutex<()>,
    /// What an earlier run had in use, kept in use because something mounted could not be understood.
    pub(crate) carried: OnceLock<BTreeSet<String>>,
    objects: Queue<Object>,
    work: Queue<VolumeId>,
    pub(crate) recorder: Recorder,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) stop: CancellationToken,
}

impl Shared {
    /// Knows the world before anything is touched: what is mounted, then every cache, then what each pod wants, and the server
    /// knows what is in use here.
    async fn start(&self, found: Found) {
        let unreadable = !found.unreadable.is_empty();
        self.state.lock().adopt(found.volumes, &self.name);
        tokio::join!(
            self.pods.synced(),
            self.nodes.synced(),
            self.claims.synced(),
            self.volumes.synced(),
            self.csi_drivers.synced(),
            self.attachments.synced()
        );
        if unreadable && let Some(node) = self.nodes.named(&self.name) {
            let _ = self.carried.set(status::in_use(&node));
        }
        for pod in self.pods.all().iter().filter(|p| self.is_here(p)) {
            let uid = pod.metadata.uid().to_owned();
            self.state.lock().names.insert(uid.clone(), Key::of(&pod.metadata));
            pods::observe(self, &uid);
        }
        let mut pause = Duration::from_millis(50);
        while let Err(error) = status::register(self).await {
            warn!(%error, "the node is not registered yet");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(10));
        }
        let (pods, volumes) = {
            let state = self.state.lock();
            (state.all_pods(), state.all_volumes())
        };
        pods.into_iter().for_each(|uid| self.wake_pod(uid));
        volumes.into_iter().for_each(|id| self.wake_volume(id));
    }

    fn is_here(&self, pod: &Pod) -> bool {
        api_pod::node_name(pod) == Some(self.name.as_str())
    }

    pub(crate) fn wake_pod(&self, uid: PodUid) {
        self.objects.add(Object::Pod(uid));
    }

    pub(crate) fn wake_volume(&self, id: VolumeId) {
        self.work.add(id);
    }

    pub(crate) fn wake_node(&self) {
        self.objects.add(Object::Node);
    }

    /// A driver nobody has described needs attachment.
    pub(crate) fn attach_required(&self, driver: &str) -> bool {
        self.csi_drivers.named(driver).is_none_or(|d| d.spec.attach_required != Some(false))
    }

    pub(crate) fn warn_pod(&self, uid: &str, reason: &str, message: &str) {
        let key = self.state.lock().names.get(uid).cloned();
        if let Some(pod) = key.and_then(|key| self.pods.get(&key)).filter(|p| p.metadata.uid() == uid) {
            self.recorder.warning(&*pod, reason, message);
        }
    }

    /// From here on changes wake what they concern. Subscriptions outlive the agent in caches that others share, so they hold it
    /// weakly.
    fn subscribe(self: &Arc<Self>) {
        self.pods.subscribe(self.weakly(|agent, change: &Change<Pod>| {
            let pod = change.object();
            if agent.is_here(pod) {
                let uid = pod.metadata.uid().to_owned();
                if let Change::Applied { .. } = change {
                    agent.state.lock().names.insert(uid.clone(), Key::of(&pod.metadata));
                }
                agent.wake_pod(uid);
            }
        }));
        self.claims.subscribe(self.weakly(|agent, change: &Change<PersistentVolumeClaim>| {
            let interested = agent.state.lock().by_claim.of(&Key::of(&change.object().metadata));
            interested.into_iter().for_each(|uid| agent.wake_pod(uid));
        }));
        self.volumes.subscribe(self.weakly(|agent, change: &Change<PersistentVolume>| {
            let name = change.object().metadata.name.clone().unwrap_or_default();
            let interested = agent.state.lock().by_volume.of(&name);
            interested.into_iter().for_each(|uid| agent.wake_pod(uid));
        }));
        self.attachments.subscribe(self.weakly(|agent, change: &Change<VolumeAttachment>| {
            let attachment = change.object();
            if attachment.spec.node_name == agent.name {
                let name = attachment.metadata.name.as_deref().unwrap_or_default();
                let id = agent.state.lock().by_attachment(name);
                id.into_iter().for_each(|id| agent.wake_volume(id));
            }
        }));
        self.nodes.subscribe(self.weakly(|agent, change: &Change<Node>| agent.node_changed(change)));
        self.csi_drivers.subscribe(self.weakly(|agent, change: &Change<CSIDriver>| {
            let name = change.object().metadata.name.as_deref().unwrap_or_default();
            let (pods, volumes) = {
                let state = agent.state.lock();
                (state.all_pods(), state.volumes_of_driver(name))
            };
            pods.into_iter().for_each(|uid| agent.wake_pod(uid));
            volumes.into_iter().for_each(|id| agent.wake_volume(id));
            agent.wake_node();
        }));
    }

    fn weakly<K>(
        self: &Arc<Self>,
        tell: impl Fn(&Shared, &Change<K>) + Send + Sync + 'static,
    ) -> impl Fn(&Change<K>) + Send + Sync + 'static {
        let agent: Weak<Shared> = Arc::downgrade(self);
        move |change| {
            if let Some(agent) = agent.upgrade() {
                tell(&agent, change);
            }
        }
    }

    /// Only what the attach/detach controller changed is of interest; the rest of the Node is ours.
    fn node_changed(&self, change: &Change<Node>) {
        if change.object().metadata.name.as_deref() != Some(self.name.as_str()) {
            return;
        }
        let (old, new) = match change {
            Change::Applied { old, new } => {
                if new.metadata.uid != *self.registered.lock() {
                    self.wake_node();
                }
                (old.as_ref().map(|n| attached(n)).unwrap_or_default(), attached(new))
            }
            Change::Deleted(last) => {
                self.state.lock().forget_reports();
                self.wake_node();
                (attached(last), BTreeSet::new())
            }
        };
        for name in old.symmetric_difference(&new) {
            match names::split_unique_volume_name(name) {
                Some((driver, handle)) => self.wake_volume(VolumeId::new(driver, handle)),
                None => self.state.lock().all_volumes().into_iter().for_each(|id| self.wake_volume(id)),
            }
        }
    }
}

fn attached(node: &Node) -> BTreeSet<String> {
    let all = node.status.iter().flat_map(|s| s.volumes_attached.iter().flatten());
    all.map(|a| a.name.clone()).collect()
}
