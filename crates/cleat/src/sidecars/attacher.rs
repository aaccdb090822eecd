//! `cleat csi-attacher`: the flags of external-attacher.

use std::time::Duration;

use clap::Args;
use cleat_runtime::Backoff;
use cleat_sidecars::csi_attacher::CsiAttacherOptions;

use super::flags::{CommonArgs, duration};

const DEFAULT_CALL_TIMEOUT: Duration = Duration::from_secs(15);
const DEFAULT_CONCURRENT_CALLS: u16 = 10;

#[derive(Args, Clone, Debug)]
pub(super) struct AttacherArgs {
    /// Interval at which the driver's list of published volumes is compared with the VolumeAttachments.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1m")]
    reconcile_sync: Duration,
    /// Maximum number of volumes per ListVolumes call; 0 for the driver's own limit.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(0..))]
    max_entries: i32,
    /// Accepted for compatibility and ignored: Cleat does not log the content of gRPC messages.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_grpc_log_length: Option<i32>,
}

impl AttacherArgs {
    /// `default_fs_type` is a parameter because `cleat sidecars` has the flag once, among the provisioner's.
    pub(super) fn options(&self, common: &CommonArgs, default_fs_type: &str) -> CsiAttacherOptions {
        CsiAttacherOptions {
            max_concurrent_calls: common.worker_threads.unwrap_or(DEFAULT_CONCURRENT_CALLS).into(),
            call_timeout: common.timeout.unwrap_or(DEFAULT_CALL_TIMEOUT),
            retry: Backoff::new(common.retry_interval_start, common.retry_interval_max),
            default_fs_type: default_fs_type.to_owned(),
            // An interval of zero would be a busy loop.
            verify_interval: self.reconcile_sync.max(Duration::from_millis(1)),
            list_page_size: self.max_entries,
        }
    }
}
