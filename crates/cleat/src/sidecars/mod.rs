//! Sidecars as separate processes, for any CSI driver and any API server: `cleat csi-provisioner` and `cleat csi-attacher`
//! replace external-provisioner and external-attacher and accept their flags; `cleat sidecars` runs both in one process.
//!
//! Leader election uses the same lease as the replaced sidecar, so that the two never work at the same time.

mod attacher;
pub mod flags;
mod metrics_endpoint;
mod owner;
mod provisioner;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use cleat_api::Key;
use cleat_csi::Endpoint;
use cleat_runtime::lease::{Election, LeadershipEnd, LeaseTiming};
use cleat_runtime::{Caches, SystemClock};
use cleat_sidecars::{Context, Driver, capacity, csi_attacher, csi_provisioner};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::signals;
use attacher::AttacherArgs;
use flags::CommonArgs;
use provisioner::ProvisionerArgs;

/// `cleat csi-provisioner`
#[derive(Args, Debug)]
pub struct ProvisionerCommand {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    provisioner: ProvisionerArgs,
}

/// `cleat csi-attacher`
#[derive(Args, Debug)]
pub struct AttacherCommand {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    attacher: AttacherArgs,
    /// File system type of volumes that do not specify one.
    #[arg(long, value_name = "TYPE", default_value = "")]
    default_fstype: String,
}

/// `cleat sidecars`
#[derive(Args, Debug)]
pub struct SidecarsCommand {
    /// Sidecars to run.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', required = true)]
    controllers: Vec<Controller>,
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    provisioner: ProvisionerArgs,
    #[command(flatten)]
    attacher: AttacherArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Controller {
    Provisioner,
    Attacher,
}

/// One sidecar with its options.
enum Sidecar {
    Provisioner(csi_provisioner::ProvisionerOptions, Box<ProvisionerArgs>),
    Attacher(csi_attacher::CsiAttacherOptions),
}

impl Sidecar {
    /// The name of the lease that the replaced sidecar uses.
    fn lease_name(&self, driver: &str) -> String {
        match self {
            Self::Provisioner(..) => driver.replace('/', "-"),
            Self::Attacher(_) => format!("external-attacher-leader-{}", driver.replace('/', "-")),
        }
    }

    async fn run(self, common: CommonArgs, context: Context, driver: Driver, stop: CancellationToken) {
        match self {
            Self::Provisioner(options, args) => {
                let publish = async {
                    match args.capacity(&common, context.client.kube()).await {
                        Ok(Some(options)) => {
                            capacity::run(context.clone(), driver.clone(), options, stop.clone()).await
                        }
                        Ok(None) => {}
                        Err(failure) => error!("publishing capacity failed: {failure:#}"),
                    }
                };
                tokio::join!(csi_provisioner::run(context.clone(), driver.clone(), options, stop.clone()), publish);
            }
            Self::Attacher(options) => csi_attacher::run(context, driver, options, stop).await,
        }
    }
}

impl ProvisionerCommand {
    pub fn log_level(&self) -> &'static str {
        log_level(&self.common)
    }

    pub async fn run(self) -> Result<()> {
        let sidecars = vec![Sidecar::Provisioner(self.provisioner.options(&self.common)?, Box::new(self.provisioner))];
        run(self.common, sidecars).await
    }
}

impl AttacherCommand {
    pub fn log_level(&self) -> &'static str {
        log_level(&self.common)
    }

    pub async fn run(self) -> Result<()> {
        let sidecars = vec![Sidecar::Attacher(self.attacher.options(&self.common, &self.default_fstype))];
        run(self.common, sidecars).await
    }
}

impl SidecarsCommand {
    pub fn log_level(&self) -> &'static str {
        log_level(&self.common)
    }

    pub async fn run(self) -> Result<()> {
        let sidecar = |controller: &Controller| match controller {
            Controller::Provisioner => {
                Ok(Sidecar::Provisioner(self.provisioner.options(&self.common)?, Box::new(self.provisioner.clone())))
            }
            Controller::Attacher => {
                Ok(Sidecar::Attacher(self.attacher.options(&self.common, self.provisioner.default_fs_type())))
            }
        };
        let sidecars = self.controllers.iter().map(sidecar).collect::<Result<Vec<_>>>()?;
        run(self.common, sidecars).await
    }
}

fn log_level(common: &CommonArgs) -> &'static str {
    match common.verbosity {
        0..=3 => "info",
        4 => "debug",
        _ => "trace",
    }
}

async fn run(common: CommonArgs, sidecars: Vec<Sidecar>) -> Result<()> {
    let stop = CancellationToken::new();
    signals::cancel_on_termination(stop.clone())?;
    let csi = Endpoint::parse(&common.csi_address).context("--csi-address")?;
    let client = connect(common.kubeconfig.as_deref(), common.master.as_deref()).await?;
    let mut tasks = JoinSet::new();
    let healthy = Arc::new(AtomicBool::new(true));
    if let Some(address) = common.http_endpoint.or(common.metrics_address) {
        let listener = metrics_endpoint::listen(address).await.with_context(|| format!("listening on {address}"))?;
        tasks.spawn(metrics_endpoint::serve(listener, common.metrics_path.clone(), healthy.clone(), stop.clone()));
    }
    let Some(driver) = Driver::connect(cleat_csi::Client::new(csi), &stop).await else { return Ok(()) };
    info!(driver = driver.name, "driver connected");
    let context = Context {
        caches: Caches::new(client.clone(), stop.clone()),
        client: client.clone().into(),
        clock: Arc::new(SystemClock),
    };
    let mut running = JoinSet::new();
    for sidecar in sidecars {
        let lease = Key::namespaced(lease_namespace(&common, &client), sidecar.lease_name(&driver.name));
        let (context, driver, stop) = (context.clone(), driver.clone(), stop.clone());
        let common = common.clone();
        if !common.leader_election {
            running.spawn(async move {
                sidecar.run(common, context, driver, stop).await;
                LeadershipEnd::Stopped
            });
            continue;
        }
        let election = election(&common, client.clone(), lease);
        let work = |stop| sidecar.run(common, context, driver, stop);
        running.spawn(async move { election.lead(stop, work).await });
    }
    let mut lost = false;
    while let Some(ended) = running.join_next().await {
        lost |= !matches!(ended, Ok(LeadershipEnd::Stopped));
        // If one sidecar loses its lease, all stop and the process exits to be restarted: a process that runs only some of its
        // sidecars would look healthy.
        healthy.store(!lost, Ordering::Relaxed);
        stop.cancel();
    }
    while tasks.join_next().await.is_some() {}
    if lost {
        bail!("leadership was lost");
    }
    Ok(())
}

/// Connects to the API server of the kubeconfig, or to that of the pod that this process runs in.
async fn connect(kubeconfig: Option<&Path>, master: Option<&str>) -> Result<Client> {
    let mut config = match kubeconfig {
        Some(file) => {
            let read = Kubeconfig::read_from(file).with_context(|| format!("reading {}", file.display()))?;
            kube::Config::from_custom_kubeconfig(read, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("using {}", file.display()))?
        }
        None => kube::Config::incluster().context("no --kubeconfig, and not in a pod")?,
    };
    if let Some(url) = master {
        config.cluster_url = url.parse().context("--master")?;
    }
    Client::try_from(config).context("connecting to the API server")
}

fn lease_namespace(common: &CommonArgs, client: &Client) -> String {
    common.leader_election_namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned())
}

fn election(common: &CommonArgs, client: Client, lease: Key) -> Election {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Election {
        client: client.into(),
        clock: Arc::new(SystemClock),
        lease,
        labels: common.leader_election_labels.as_ref().clone(),
        identity: format!("{host}-{}", std::process::id()),
        timing: LeaseTiming {
            lease_duration: common.leader_election_lease_duration,
            renew_deadline: common.leader_election_renew_deadline,
            retry_period: common.leader_election_retry_period,
        },
    }
}
