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

use super::flags::{CommonArgs, duration};
use super::owner::owner_of_pod;

const DEFAULT_CALL_TIMEOUT: Duration = Duration::from_secs(10);
const DEFAULT_CONCURRENT_CALLS: u16 = 100;

#[derive(Args, Clone, Debug)]
pub(super) struct ProvisionerArgs {
    /// Prefix of the names of volumes.
    #[arg(long, value_name = "PREFIX", default_value = "pvc")]
    volume_name_prefix: String,
    /// Number of characters of the claim's uid in a volume's name, without dashes; -1 for the whole uid with dashes.
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    volume_name_uuid_length: i32,
    /// File system type of volumes whose StorageClass does not specify one.
    #[arg(long, value_name = "TYPE", default_value = "")]
    default_fstype: String,
    /// Pass the names of the claim and the volume to CreateVolume.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    extra_create_metadata: bool,
    /// Request volumes in the topology of the selected node only.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    strict_topology: bool,
    /// Pass the topologies of all nodes to CreateVolume if no node was selected.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    immediate_topology: bool,
    /// Mark volumes that are only accessed for reading as read-only.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    controller_publish_readonly: bool,
    /// Refuse to restore a snapshot as a volume with another volume mode.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    prevent_volume_mode_conversion: bool,
    /// Publish the driver's free capacity as CSIStorageCapacity objects, for the scheduler.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    enable_capacity: bool,
    /// Publish capacity also for StorageClasses with immediate binding.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    capacity_for_immediate_binding: bool,
    /// Interval at which the driver's capacity is read although no volume was created or deleted.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1m")]
    capacity_poll_interval: Duration,
    /// Owner of the CSIStorageCapacity objects: 0 is the pod in $POD_NAME, 1 its owner, and so on; -1 for no owner.
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    capacity_ownerref_level: i32,
    /// Serve the node in $NODE_NAME only. Use this where a provisioner runs on every node, beside its driver.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    node_deployment: bool,
    /// With --node-deployment: also provision claims with immediate binding, in competition with the other nodes.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    node_deployment_immediate_binding: bool,
    /// Delay before this node tries to provision a claim with immediate binding. It doubles with each further try.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "20s")]
    node_deployment_base_delay: Duration,
    /// Maximum of that delay.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "60s")]
    node_deployment_max_delay: Duration,
}

impl ProvisionerArgs {
    /// The options for publishing capacity; `None` without --enable-capacity.
    pub(super) async fn capacity(&self, common: &CommonArgs, client: &Client) -> Result<Option<CapacityOptions>> {
        if !self.enable_capacity {
            return Ok(None);
        }
        let namespace = std::env::var("NAMESPACE").unwrap_or_else(|_| client.default_namespace().to_owned());
        let owner_reference = match std::env::var("POD_NAME") {
            Ok(pod) if self.capacity_ownerref_level >= 0 => {
                Some(owner_of_pod(client, &namespace, &pod, self.capacity_ownerref_level).await?)
            }
            Ok(_) | Err(_) => None,
        };
        let defaults = CapacityOptions::new(namespace);
        let managed_by = match self.local(common)? {
            Some(local) => names::node_label_value(&defaults.owner.managed_by, &local.node),
            None => defaults.owner.managed_by.clone(),
        };
        Ok(Some(CapacityOptions {
            owner: CapacityOwner { owner_reference, managed_by, ..defaults.owner },
            own_node_only: self.node_deployment,
            poll_interval: self.capacity_poll_interval,
            include_immediate: self.capacity_for_immediate_binding,
            call_timeout: common.timeout.unwrap_or(DEFAULT_CALL_TIMEOUT),
        }))
    }

    pub(super) fn default_fs_type(&self) -> &str {
        &self.default_fstype
    }

    pub(super) fn options(&self, common: &CommonArgs) -> Result<ProvisionerOptions> {
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
            max_concurrent_reconciles: common.worker_threads.unwrap_or(DEFAULT_CONCURRENT_CALLS).into(),
            call_timeout: common.timeout.unwrap_or(DEFAULT_CALL_TIMEOUT),
            node_deployment: local,
        })
    }

    /// The options of --node-deployment; `None` without it.
    fn local(&self, common: &CommonArgs) -> Result<Option<NodeDeploymentOptions>> {
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
