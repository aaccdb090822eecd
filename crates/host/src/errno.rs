//! The error of a system call that was made through libc.

use std::io;

use rustix::io::Errno;

/// The errno of this thread. Must be called directly after the failed call.
pub(crate) fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
