//! `cleat csi-attacher`: the flags of external-attacher.

use std::time::Duration;

use clap::Args;
use cleat_runtime::Backoff;
use cleat_sidecars::csi_attacher::CsiAttacherOptions;

use super::flags::{Common, duration};

const DEADLINE: Duration = Duration::from_secs(15);
const WORKERS: u16 = 10;

#[derive(Args, Clone, Debug)]
pub(super) struct AttacherArgs {
    /// How often the driver's list of published volumes is compared with the attachments.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1m")]
    reconcile_sync: Duration,
    /// How many volumes to ask the driver for at a time; 0 leaves it to the driver.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(0..))]
    max_entries: i32,
    /// Accepted for compatibility. Cleat logs no messages, only that they were sent.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_grpc_log_length: Option<i32>,
}

impl AttacherArgs {
    /// The default file system is a flag of two sidecars: who has it, passes it on.
    pub(super) fn options(&self, common: &Common, default_fs_type: &str) -> CsiAttacherOptions {
        CsiAttacherOptions {
            max_concurrent_calls: common.worker_threads.unwrap_or(WORKERS).into(),
            call_timeout: common.timeout.unwrap_or(DEADLINE),
            retry: Backoff::new(common.retry_interval_start, common.retry_interval_max),
            default_fs_type: default_fs_type.to_owned(),
            // A pause of nothing would be no pause.
            verify_interval: self.reconcile_sync.max(Duration::from_millis(1)),
            list_page_size: self.max_entries,
        }
    }
}
