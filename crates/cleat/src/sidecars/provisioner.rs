//! `cleat csi-provisioner`: the flags of external-provisioner.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use cleat_api::names;
use cleat_runtime::Backoff;
use cleat_sidecars::capacity::{CapacityOptions, decide::CapacityOwner};
use cleat_sidecars::csi_provisioner::decide::ProvisionPolicy;
use cleat_sidecars::csi_provisioner::{NodeDeploymentOptions, ProvisionerOptions};
use kube::Client;

use super::flags::{Common, duration};
use super::owner;

const DEADLINE: Duration = Duration::from_secs(10);
const WORKERS: u16 = 100;

#[derive(Args, Clone, Debug)]
pub(super) struct ProvisionerArgs {
    /// How the names of volumes begin.
    #[arg(long, value_name = "PREFIX", default_value = "pvc")]
    volume_name_prefix: String,
    /// How many characters of the claim's uid a volume's name has, without dashes; -1 for all of it, as it is.
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    volume_name_uuid_length: i32,
    /// The file system type, where a class gives none.
    #[arg(long, value_name = "TYPE", default_value = "")]
    default_fstype: String,
    /// Tell the driver the names of claim and volume.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    extra_create_metadata: bool,
    /// Ask for volumes in the chosen node's own topology only.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    strict_topology: bool,
    /// Tell the driver of all topologies where no node was chosen.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    immediate_topology: bool,
    /// Record volumes that are only read as read-only.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    controller_publish_readonly: bool,
    /// Refuse to restore a snapshot as a volume of another mode.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    prevent_volume_mode_conversion: bool,
    /// Publish how much room the driver has, for the scheduler.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    enable_capacity: bool,
    /// For classes that do not wait for a consumer, too.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    capacity_for_immediate_binding: bool,
    /// How often the driver is asked again, though no volume came or went.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1m")]
    capacity_poll_interval: Duration,
    /// Who owns what is published, counted from the pod in $POD_NAME: 0 is the pod, 1 its owner; -1 for nobody.
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    capacity_ownerref_level: i32,
    /// Serve the node in $NODE_NAME only; a provisioner like this one runs on every node, beside its driver.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    node_deployment: bool,
    /// With --node-deployment: compete for claims that no node was chosen for.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    node_deployment_immediate_binding: bool,
    /// How long such a claim is left to other nodes at first; each time after, twice as long.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "20s")]
    node_deployment_base_delay: Duration,
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "60s")]
    node_deployment_max_delay: Duration,
}

impl ProvisionerArgs {
    /// How to publish capacity, if that is asked for.
    pub(super) async fn capacity(&self, common: &Common, client: &Client) -> Result<Option<CapacityOptions>> {
        if !self.enable_capacity {
            return Ok(None);
        }
        let namespace = std::env::var("NAMESPACE").unwrap_or_else(|_| client.default_namespace().to_owned());
        let owner_reference = match std::env::var("POD_NAME") {
            Ok(pod) if self.capacity_ownerref_level >= 0 => {
                Some(owner::of_pod(client, &namespace, &pod, self.capacity_ownerref_level).await?)
            }
            Ok(_) | Err(_) => None,
        };
        let usual = CapacityOptions::new(namespace);
        let managed_by = match self.local(common)? {
            Some(local) => names::label(&usual.owner.managed_by, &local.node),
            None => usual.owner.managed_by.clone(),
        };
        Ok(Some(CapacityOptions {
            owner: CapacityOwner { owner_reference, managed_by, ..usual.owner },
            own_node_only: self.node_deployment,
            poll_interval: self.capacity_poll_interval,
            include_immediate: self.capacity_for_immediate_binding,
            call_timeout: common.timeout.unwrap_or(DEADLINE),
        }))
    }

    pub(super) fn default_fs_type(&self) -> &str {
        &self.default_fstype
    }

    pub(super) fn options(&self, common: &Common) -> Result<ProvisionerOptions> {
        let local = self.local(common)?;
        let policy = ProvisionPolicy {
            volume_name_prefix: self.volume_name_prefix.clone(),
            volume_name_uuid_length: usize::try_from(self.volume_name_uuid_length).ok(),
            default_fs_type: Some(self.default_fstype.clone()).filter(|t| !t.is_empty()),
            extra_create_metadata: self.extra_create_metadata,
            strict_topology: self.strict_topology,
            immediate_topology: self.immediate_topology,
            publish_read_only: self.controller_publish_readonly,
            prevent_volume_mode_conversion: self.prevent_volume_mode_conversion,
            local: None,
        };
        Ok(ProvisionerOptions {
            policy,
            retry: Backoff::new(common.retry_interval_start, common.retry_interval_max),
            max_concurrent_reconciles: common.worker_threads.unwrap_or(WORKERS).into(),
            call_timeout: common.timeout.unwrap_or(DEADLINE),
            node_deployment: local,
        })
    }

    /// The node to serve, if it is to be one only.
    fn local(&self, common: &Common) -> Result<Option<NodeDeploymentOptions>> {
        if !self.node_deployment {
            return Ok(None);
        }
        if common.leader_election {
            bail!(
                "--node-deployment and --leader-election exclude each other: each node's provisioner does its own work"
            );
        }
        let node = std::env::var("NODE_NAME").ok().filter(|name| !name.is_empty());
        Ok(Some(NodeDeploymentOptions {
            node: node.context("--node-deployment needs the node's name in $NODE_NAME")?,
            immediate: self.node_deployment_immediate_binding,
            base_delay: self.node_deployment_base_delay,
            max_delay: self.node_deployment_max_delay,
        }))
    }
}
