//! `cleat up`: the whole stack in one process, with the drivers as child processes.
//!
//! All components except the drivers use the API server's in-process client. They start in the order API server, default
//! objects, drivers, all other components. They stop in the order controllers, sidecars and node agents, then the drivers,
//! then the API server: no component loses a component that it calls while it still works. Mounts stay in place.

mod args;
pub mod layout;
pub mod objects;
pub mod supervise;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
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

pub use args::{StackPart, UpArgs};

use crate::logging::LOG_ENV;
use crate::{console, signals};
use layout::{Layout, node_names};
use supervise::{Program, SupervisedChild};

/// How to run a stack.
#[derive(Clone, Debug)]
pub struct StackConfig {
    pub data_dir: PathBuf,
    /// Number of nodes.
    pub nodes: u16,
    pub listen: SocketAddr,
    pub audit_log: Option<PathBuf>,
    pub encryption_key: Option<PathBuf>,
    /// The directory of FlexVolume drivers; `None` for the one in the data directory.
    pub flex_drivers: Option<PathBuf>,
    /// When volumes are detached from nodes that are not ready.
    pub attach: attach::DetachPolicy,
    /// The `cleat` binary, which is also the driver's program.
    pub program: PathBuf,
    /// The drivers' log level; `None` for that of this process. The environment variable `CLEAT_LOG` has precedence.
    pub driver_log: Option<&'static str>,
    /// Parts of the stack that are not run.
    pub without: Vec<StackPart>,
}

impl StackConfig {
    /// A temporary stack: listens on a free port of the loopback interface, and its drivers log errors only.
    pub fn scratch(data_dir: impl Into<PathBuf>, nodes: u16, program: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            nodes,
            listen: ([127, 0, 0, 1], 0).into(),
            audit_log: None,
            encryption_key: None,
            flex_drivers: None,
            attach: attach::DetachPolicy::default(),
            program: program.into(),
            driver_log: Some("error"),
            without: Vec::new(),
        }
    }
}

/// A running stack. Call [`Stack::stop`]: dropping it ends the tasks without an order.
pub struct Stack {
    server: Arc<ApiServer>,
    layout: Layout,
    /// Shared by all components of the process, so that each kind is watched once.
    caches: Caches,
    /// Controllers, sidecars and node agents.
    acting: JoinSet<()>,
    /// The API server.
    serving: JoinSet<()>,
    drivers: Vec<SupervisedChild>,
    stop_acting: CancellationToken,
    stop_serving: CancellationToken,
}

pub async fn command(args: UpArgs) -> Result<()> {
    let program = std::env::current_exe().context("finding the cleat binary")?;
    let stop = CancellationToken::new();
    signals::cancel_on_termination(stop.clone())?;
    let attach = match args.disable_force_detach_on_timeout {
        true => attach::DetachPolicy { force_after: None },
        false => attach::DetachPolicy::default(),
    };
    let config = StackConfig {
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
    console::print(&format!("cleat is up at https://{address}\n  export KUBECONFIG={kubeconfig}\n"));
    stop.cancelled().await;
    info!("stopping the stack");
    stack.stop().await;
    Ok(())
}

/// Fails unless the process runs as root, which mounts and loop devices need.
pub fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("mounts and loop devices need root: run this command as root (sudo)");
    }
    Ok(())
}

impl Stack {
    pub async fn start(config: StackConfig) -> Result<Self> {
        require_root()?;
        let names = node_names(config.nodes);
        let layout = prepare(&config.data_dir, &names)?;
        let mut server_config = cleat_apiserver::Config::new(layout.root(), config.listen);
        server_config.audit_log = config.audit_log.clone();
        server_config.encryption_key = config.encryption_key.clone();
        server_config.more_metrics = vec![cleat_csi::metrics::register, cleat_runtime::metrics::register];
        let server = ApiServer::open(server_config)
            .await
            .with_context(|| format!("opening the API server in {}", layout.root().display()))?;
        let stop_acting = CancellationToken::new();
        let mut stack = Self {
            caches: Caches::new(component(&server, "system:cleat:caches"), stop_acting.clone()),
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
        objects::ensure(&stack.client().into()).await?;
        stack.start_drivers(&config, &names)?;
        let flex = stack.start_flex_drivers(&config);
        stack.start_controllers(&config, flex);
        stack.start_sidecars(&config, &names);
        stack.start_nodes(&names);
        info!(data = %stack.layout.root().display(), nodes = names.len(), "stack started");
        Ok(stack)
    }

    /// An in-process client with all permissions.
    pub fn client(&self) -> Client {
        self.server.client("system:admin")
    }

    pub fn kubeconfig(&self) -> &Path {
        self.server.kubeconfig()
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Stops all components in order and waits for each.
    pub async fn stop(mut self) {
        self.stop_acting.cancel();
        while self.acting.join_next().await.is_some() {}
        let drivers = std::mem::take(&mut self.drivers);
        let ended = tokio::task::spawn_blocking(|| drivers.into_iter().for_each(SupervisedChild::stop));
        if let Err(failure) = ended.await {
            error!(%failure, "stopping the drivers failed");
        }
        self.stop_serving.cancel();
        while self.serving.join_next().await.is_some() {}
    }

    fn start_drivers(&mut self, config: &StackConfig, nodes: &[String]) -> Result<()> {
        let pool = self.layout.pool();
        let mut start = |name: String, socket: PathBuf, node: &str, mode: &str| -> Result<()> {
            let arguments = ["driver", "block", "--with-parent", "--node-id", node, "--mode", mode];
            let mut arguments: Vec<_> = arguments.into_iter().map(Into::into).collect();
            arguments.push("--pool".into());
            arguments.push(pool.clone().into());
            arguments.push("--endpoint".into());
            arguments.push(socket.into());
            let log = config.driver_log.filter(|_| std::env::var_os(LOG_ENV).is_none());
            let environment = log.map(|level| (LOG_ENV, level.to_owned())).into_iter().collect();
            let program = Program { path: config.program.clone(), arguments, environment };
            let child = SupervisedChild::start(name.clone(), program);
            self.drivers.push(child.with_context(|| format!("starting {name}"))?);
            Ok(())
        };
        start("driver".to_owned(), self.layout.controller_socket(), "controller", "controller")?;
        for node in nodes {
            start(format!("driver {node}"), self.layout.node_socket(node, block::NAME), node, "node")?;
        }
        Ok(())
    }

    /// Starts the discovery of FlexVolume drivers and their attacher. A driver is a program that runs only during a call.
    fn start_flex_drivers(&mut self, config: &StackConfig) -> Drivers {
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

    fn start_controllers(&mut self, config: &StackConfig, flex: Drivers) {
        use cleat_controllers::{Context, bind, collect, ephemeral, lifecycle, protect, schedule};
        let context = |user: &str| Context {
            client: component(&self.server, user),
            caches: self.caches.clone(),
            clock: Arc::new(SystemClock),
        };
        let stop = || self.stop_acting.clone();
        let provisioned = !config.without.contains(&StackPart::Provisioner);
        let holding_provisioners = provisioned.then(|| block::NAME.to_owned()).into_iter().collect();
        let binder = bind::BindOptions { holding_provisioners };
        self.acting.spawn(bind::run(context("system:cleat:binder"), binder, stop()));
        self.acting.spawn(collect::run(context("system:cleat:collector"), stop()));
        self.acting.spawn(ephemeral::run(context("system:cleat:ephemeral"), stop()));
        self.acting.spawn(lifecycle::run(context("system:cleat:node-lifecycle"), stop()));
        self.acting.spawn(protect::run(context("system:cleat:protector"), stop()));
        self.acting.spawn(schedule::run(context("system:cleat:scheduler"), stop()));
        self.acting.spawn(attach::run(context("system:cleat:attach-detach"), config.attach, flex, stop()));
    }

    fn start_sidecars(&mut self, config: &StackConfig, nodes: &[String]) {
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
            if !without.contains(&StackPart::Provisioner) {
                let publish = capacity::CapacityOptions::new("kube-system");
                running.spawn(capacity::run(provisioner.clone(), driver.clone(), publish, stop.clone()));
                running.spawn(csi_provisioner::run(
                    provisioner,
                    driver.clone(),
                    csi_provisioner::ProvisionerOptions::default(),
                    stop.clone(),
                ));
            }
            if !without.contains(&StackPart::Attacher) {
                running.spawn(csi_attacher::run(attacher, driver, csi_attacher::CsiAttacherOptions::default(), stop));
            }
            running.join_all().await;
        });
        for node in nodes {
            let options = NodeRegistrarOptions {
                driver_socket: self.layout.node_socket(node, block::NAME),
                registry: self.layout.registry(node),
            };
            let stop = self.stop_acting.clone();
            self.acting.spawn(async move {
                if let Err(failure) = node_registrar::run(options, stop).await {
                    error!(%failure, "the driver cannot be registered with its node");
                }
            });
        }
    }

    fn start_nodes(&mut self, nodes: &[String]) {
        for name in nodes {
            let config = cleat_node::Config::new(name, self.layout.node(name));
            let client = component(&self.server, &format!("system:node:{name}"));
            let agent = cleat_node::Agent::new(config, client, self.caches.clone());
            let stop = self.stop_acting.clone();
            let node = name.clone();
            self.acting.spawn(async move {
                if let Err(failure) = agent.run(stop).await {
                    error!(node, %failure, "node agent failed");
                }
            });
        }
    }
}

/// The client of a component, authenticated as `user`. Calls do not leave the process.
fn component(server: &ApiServer, user: &str) -> cleat_runtime::Client {
    cleat_runtime::Client::in_process(server.transport(user), server.component(user))
}

/// Creates the directories that drivers and node agents expect.
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
