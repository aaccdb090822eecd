//! The errors of the store: one enum per operation.

use std::path::PathBuf;
use std::sync::Arc;

use crate::entry::{Entry, Revision};

type Source = Arc<dyn std::error::Error + Send + Sync>;

#[derive(Debug, Clone, thiserror::Error)]
pub enum WriteError {
    #[error("the key {key} exists already")]
    Exists { key: String, current: Entry },
    #[error("the key {key} does not exist")]
    Missing { key: String },
    #[error("the key {key} was changed: expected revision {expected}, found {}", current.modified)]
    Conflict { key: String, expected: Revision, current: Entry },
    #[error("the write to {key} may or may not be durable")]
    Uncertain {
        key: String,
        #[source]
        source: Source,
    },
    #[error("the store is closed")]
    Closed,
}

#[derive(Debug, Clone, thiserror::Error)]
pub enum ReadError {
    #[error("the store cannot be read")]
    Unavailable(#[source] Source),
}

#[derive(Debug, Clone, thiserror::Error)]
pub enum ListError {
    #[error("revision {asked} is too old: history starts after {oldest}")]
    TooOld { asked: Revision, oldest: Revision },
    #[error("revision {asked} is in the future: the newest is {current}")]
    Future { asked: Revision, current: Revision },
    #[error(transparent)]
    Read(#[from] ReadError),
}

#[derive(Debug, Clone, thiserror::Error)]
pub enum WatchError {
    #[error("revision {asked} is too old: history starts after {oldest}")]
    TooOld { asked: Revision, oldest: Revision },
    #[error("revision {asked} is in the future: the newest is {current}")]
    Future { asked: Revision, current: Revision },
    #[error("the store is closed")]
    Closed,
    #[error(transparent)]
    Read(#[from] ReadError),
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("another process uses the store {path}")]
    Locked { path: PathBuf },
    #[error("the store {path} is damaged ({what}); it was not changed")]
    Corrupt { path: PathBuf, what: String },
    #[error("the store {path} has format {found}; this version of Cleat opens only format {expected}")]
    Format { path: PathBuf, found: u64, expected: u64 },
    #[error("the store {path} is encrypted (for example {key}); start with its encryption key file")]
    Encrypted { path: PathBuf, key: String },
    #[error("the store {path} is encrypted with a key that was not given (for example {key}); it was not changed")]
    WrongKey { path: PathBuf, key: String },
    #[error("cannot {step} the store {path}")]
    Io {
        step: &'static str,
        path: PathBuf,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
