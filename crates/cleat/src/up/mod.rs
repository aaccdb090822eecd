//! The whole stack in one process, the drivers as children.
//!
//! Everything but the drivers talks to the API server through its in-process client. Order of starting: server, the
//! objects it brings along, drivers, then everybody else. Order of stopping: whoever acts, then the drivers, then the
//! server, so that nobody loses the ground while still working. What is mounted stays mounted.

pub mod layout;
pub mod objects;
pub mod signals;
pub mod supervise;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use cleat_apiserver::ApiServer;
use cleat_controllers::attach;
use cleat_csi::Endpoint;
use cleat_drivers::block;
use cleat_flex::Drivers;
use cleat_runtime::{Caches, SystemClock};
use cleat_sidecars::node_registrar::NodeRegistrarOptions;
use kube::Client;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::cli::{LOG, UpArgs, say};
use layout::{Layout, node_names};
use supervise::{Program, Supervised};

#[derive(Clone, Debug)]
pub struct Config {
    pub data_dir: PathBuf,
    pub nodes: u16,
    pub listen: SocketAddr,
    pub audit_log: Option<PathBuf>,
    pub encryption_key: Option<PathBuf>,
    /// Where FlexVolume drivers lie, if not in the data directory.
    pub flex_drivers: Option<PathBuf>,
    /// What becomes of volumes on nodes that say nothing any more.
    pub attach: attach::Policy,
    /// The `cleat` binary, which is also the driver.
    pub program: PathBuf,
    /// How much the drivers log, where that differs from what the environment says.
    pub driver_log: Option<&'static str>,
    /// What is left to programs beside this one.
    pub without: Vec<Part>,
}

/// A part of the stack that can run elsewhere, as a client of its API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// csi-provisioner's work for the block driver.
    Provisioner,
    /// csi-attacher's work for the block driver.
    Attacher,
}

impl Config {
    /// A stack of its own in a scratch directory: a free port of this machine only, and drivers that report errors only.
    pub fn scratch(data_dir: impl Into<PathBuf>, nodes: u16, program: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            nodes,
            listen: ([127, 0, 0, 1], 0).into(),
            audit_log: None,
            encryption_key: None,
            flex_drivers: None,
            attach: attach::Policy::default(),
            program: program.into(),
            driver_log: Some("error"),
            without: Vec::new(),
        }
    }
}

/// A running stack.
pub struct Stack {
    server: Arc<ApiServer>,
    layout: Layout,
    /// One set of watches for everybody in the process.
    caches: Caches,
    acting: JoinSet<()>,
    serving: JoinSet<()>,
    drivers: Vec<Supervised>,
    stop_acting: CancellationToken,
    stop_serving: CancellationToken,
}

pub async fn command(args: UpArgs) -> Result<()> {
    let program = std::env::current_exe().context("finding the cleat binary")?;
    let stop = CancellationToken::new();
    signals::cancel_on_end(stop.clone())?;
    let attach = match args.disable_force_detach_on_timeout {
        true => attach::Policy { force_after: None },
        false => attach::Policy::default(),
    };
    let config = Config {
        data_dir: args.data_dir,
        nodes: args.nodes,
        listen: args.listen,
        audit_log: args.audit_log,
        encryption_key: args.encryption_key,
        flex_drivers: args.flex_volume_plugin_dir,
        attach,
        program,
        driver_log: None,
        without: args.without,
    };
    let stack = Stack::start(config).await?;
    let (address, kubeconfig) = (stack.server.address(), stack.kubeconfig().display());
    say(&format!("cleat is up at https://{address}\n  export KUBECONFIG={kubeconfig}\n"));
    stop.cancelled().await;
    info!("stopping");
    stack.stop().await;
    Ok(())
}

/// Mounts and loop devices are the kernel's: without the right to them nothing below can work.
pub fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("mounts and loop devices need root: run this command as root (sudo)");
    }
    Ok(())
}

impl Stack {
    pub async fn start(config: Config) -> Result<Self> {
        require_root()?;
        let names = node_names(config.nodes);
        let layout = prepare(&config.data_dir, &names)?;
        let mut served = cleat_apiserver::Config::new(layout.root(), config.listen);
        served.audit_log = config.audit_log.clone();
        served.encryption_key = config.encryption_key.clone();
        served.more_metrics = vec![cleat_csi::metrics::register, cleat_runtime::metrics::register];
        let server = ApiServer::open(served)
            .await
            .with_context(|| format!("opening the API server in {}", layout.root().display()))?;
        let stop_acting = CancellationToken::new();
        let mut stack = Self {
            caches: Caches::new(server.component("system:cleat:caches"), stop_acting.clone()),
            server: Arc::new(server),
            drivers: Vec::new(),
            acting: JoinSet::new(),
            serving: JoinSet::new(),
            stop_serving: CancellationToken::new(),
            stop_acting,
            layout,
        };
        let (server, stop) = (stack.server.clone(), stack.stop_serving.clone());
        stack.serving.spawn(async move { server.serve(stop).await });
        objects::ensure(&stack.client()).await?;
        stack.start_drivers(&config, &names)?;
        let flex = stack.start_flex_drivers(&config);
        stack.start_controllers(&config, flex);
        stack.start_sidecars(&config, &names);
        stack.start_nodes(&names);
        info!(data = %stack.layout.root().display(), nodes = names.len(), "up");
        Ok(stack)
    }

    /// A client with every right, in this process.
    pub fn client(&self) -> Client {
        self.server.client("system:admin")
    }

    pub fn kubeconfig(&self) -> &Path {
        self.server.kubeconfig()
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Stops everything and waits for it.
    pub async fn stop(mut self) {
        self.stop_acting.cancel();
        while self.acting.join_next().await.is_some() {}
        let drivers = std::mem::take(&mut self.drivers);
        let ended = tokio::task::spawn_blocking(|| drivers.into_iter().for_each(Supervised::end));
        if let Err(failure) = ended.await {
            error!(%failure, "drivers were not stopped in order");
        }
        self.stop_serving.cancel();
        while self.serving.join_next().await.is_some() {}
    }

    fn start_drivers(&mut self, config: &Config, nodes: &[String]) -> Result<()> {
        let pool = self.layout.pool();
        let mut start = |name: String, socket: PathBuf, node: &str, mode: &str| -> Result<()> {
            let arguments = ["driver", "block", "--with-parent", "--node-id", node, "--mode", mode];
            let mut arguments: Vec<_> = arguments.into_iter().map(Into::into).collect();
            arguments.push("--pool".into());
            arguments.push(pool.clone().into());
            arguments.push("--endpoint".into());
            arguments.push(socket.into());
            let log = config.driver_log.filter(|_| std::env::var_os(LOG).is_none());
            let environment = log.map(|level| (LOG, level.to_owned())).into_iter().collect();
            let program = Program { path: config.program.clone(), arguments, environment };
            let child = Supervised::start(name.clone(), program);
            self.drivers.push(child.with_context(|| format!("starting {name}"))?);
            Ok(())
        };
        start("driver".to_owned(), self.layout.controller_socket(), "controller", "controller")?;
        for node in nodes {
            start(format!("driver {node}"), self.layout.node_socket(node, block::NAME), node, "node")?;
        }
        Ok(())
    }

    /// The drivers themselves run only while they are called.
    fn start_flex_drivers(&mut self, config: &Config) -> Drivers {
        use cleat_sidecars::{Context, flex_attacher};
        let directory = config.flex_drivers.clone().unwrap_or_else(|| self.layout.flex_drivers());
        let drivers = Drivers::new(cleat_flex::Config::new(directory, self.layout.flex_calls()));
        self.acting.spawn(drivers.clone().run(self.stop_acting.clone()));
        let context = Context {
            client: component(&self.server, "system:cleat:flex-attacher"),
            caches: self.caches.clone(),
            clock: Arc::new(SystemClock),
        };
        let options = flex_attacher::FlexAttacherOptions::default();
        self.acting.spawn(flex_attacher::run(context, drivers.clone(), options, self.stop_acting.clone()));
        drivers
    }

    fn start_controllers(&mut self, config: &Config, flex: Drivers) {
        use cleat_controllers::{Context, bind, collect, ephemeral, lifecycle, protect, schedule};
        let context = |user: &str| Context {
            client: component(&self.server, user),
            caches: self.caches.clone(),
            clock: Arc::new(SystemClock),
        };
        let stop = || self.stop_acting.clone();
        let provisioned = !config.without.contains(&Part::Provisioner);
        let holding_provisioners = provisioned.then(|| block::NAME.to_owned()).into_iter().collect();
        let binder = bind::Options { holding_provisioners };
        self.acting.spawn(bind::run(context("system:cleat:binder"), binder, stop()));
        self.acting.spawn(collect::run(context("system:cleat:collector"), stop()));
        self.acting.spawn(ephemeral::run(context("system:cleat:ephemeral"), stop()));
        self.acting.spawn(lifecycle::run(context("system:cleat:node-lifecycle"), stop()));
        self.acting.spawn(protect::run(context("system:cleat:protector"), stop()));
        self.acting.spawn(schedule::run(context("system:cleat:scheduler"), stop()));
        self.acting.spawn(attach::run(context("system:cleat:attach-detach"), config.attach, flex, stop()));
    }

    fn start_sidecars(&mut self, config: &Config, nodes: &[String]) {
        use cleat_sidecars::{Context, Driver, capacity, csi_attacher, csi_provisioner, node_registrar};
        let context = |user: &str| Context {
            client: component(&self.server, user),
            caches: self.caches.clone(),
            clock: Arc::new(SystemClock),
        };
        let client = cleat_csi::Client::new(Endpoint::unix(self.layout.controller_socket()));
        let (provisioner, attacher) = (context("system:cleat:provisioner"), context("system:cleat:attacher"));
        let (stop, without) = (self.stop_acting.clone(), config.without.clone());
        self.acting.spawn(async move {
            let Some(driver) = Driver::connect(client, &stop).await else { return };
            let mut running = JoinSet::new();
            if !without.contains(&Part::Provisioner) {
                let publish = capacity::CapacityOptions::new("kube-system");
                running.spawn(capacity::run(provisioner.clone(), driver.clone(), publish, stop.clone()));
                running.spawn(csi_provisioner::run(
                    provisioner,
                    driver.clone(),
                    csi_provisioner::ProvisionerOptions::default(),
                    stop.clone(),
                ));
            }
            if !without.contains(&Part::Attacher) {
                running.spawn(csi_attacher::run(attacher, driver, csi_attacher::CsiAttacherOptions::default(), stop));
            }
            running.join_all().await;
        });
        for node in nodes {
            let announcement = NodeRegistrarOptions {
                driver_socket: self.layout.node_socket(node, block::NAME),
                registry: self.layout.registry(node),
            };
            let stop = self.stop_acting.clone();
            self.acting.spawn(async move {
                if let Err(failure) = node_registrar::run(announcement, stop).await {
                    error!(%failure, "the driver cannot be announced to its node");
                }
            });
        }
    }

    fn start_nodes(&mut self, nodes: &[String]) {
        for name in nodes {
            let config = cleat_node::Config::new(name, self.layout.node(name));
            let client = self.server.component(&format!("system:node:{name}"));
            let agent = cleat_node::Agent::new(config, client, self.caches.clone());
            let stop = self.stop_acting.clone();
            let node = name.clone();
            self.acting.spawn(async move {
                if let Err(failure) = agent.run(stop).await {
                    error!(node, %failure, "the node agent gave up");
                }
            });
        }
    }
}

/// The way of a component of this process to the server.
fn component(server: &ApiServer, user: &str) -> cleat_runtime::Client {
    cleat_runtime::Client::direct(server.component(user), server.direct(user))
}

/// Makes the directories that must be there before anything starts.
fn prepare(data_dir: &Path, nodes: &[String]) -> Result<Layout> {
    std::fs::create_dir_all(data_dir).with_context(|| format!("creating {}", data_dir.display()))?;
    let root = data_dir.canonicalize().with_context(|| format!("resolving {}", data_dir.display()))?;
    let layout = Layout::new(root);
    let mut directories = vec![layout.pool()];
    for node in nodes {
        directories.push(layout.registry(node));
        directories.extend(layout.node_socket(node, block::NAME).parent().map(Path::to_owned));
    }
    for directory in directories {
        std::fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    }
    Ok(layout)
}
