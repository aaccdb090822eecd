//! The audit log: one line of JSON per request, saying who did what and how it ended. Bodies never come here, and so no
//! secret does.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};

use crate::authenticate::Caller;
use crate::http::gate::Asked;

pub(crate) struct Audit(Sender<Value>);

impl Audit {
    /// Appends to the file, which only the owner can read.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
        let (sender, lines) = channel();
        std::thread::Builder::new().name("cleat-audit".into()).spawn(move || write(file, &lines))?;
        Ok(Self(sender))
    }

    /// `known` is who asked, `acted` whom it was done for; they differ if one impersonates the other.
    pub(crate) fn record(
        &self,
        id: &str,
        known: Option<&Caller>,
        acted: Option<&Caller>,
        asked: &Asked,
        code: StatusCode,
        took: Duration,
    ) {
        let mut line = json!({
            "kind": "Event", "apiVersion": "audit.k8s.io/v1", "level": "Metadata", "stage": "ResponseComplete",
            "auditID": id, "requestURI": asked.uri, "verb": asked.verb,
            "responseStatus": { "metadata": {}, "code": code.as_u16() },
            "stageTimestamp": jiff::Timestamp::now().to_string(),
            "latencyMicroseconds": u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        });
        for (key, caller) in [("user", known), ("impersonatedUser", acted.filter(|acted| Some(*acted) != known))] {
            if let Some(caller) = caller {
                line[key] = json!({ "username": caller.name, "groups": caller.groups });
            }
        }
        if let Some(target) = &asked.target {
            let mut object = json!({ "resource": target.plural, "apiVersion": target.version });
            for (key, value) in [
                ("apiGroup", Some(&target.group)),
                ("namespace", target.namespace.as_ref()),
                ("name", target.name.as_ref()),
                ("subresource", target.subresource.as_ref()),
            ] {
                if let Some(value) = value.filter(|v| !v.is_empty()) {
                    object[key] = value.clone().into();
                }
            }
            line["objectRef"] = object;
        }
        // The writer is gone only when the disk refused; it has said so.
        let _ = self.0.send(line);
    }
}

fn write(file: File, lines: &Receiver<Value>) {
    let mut out = BufWriter::new(file);
    while let Ok(first) = lines.recv() {
        let batch = std::iter::once(first).chain(lines.try_iter());
        let written = batch.into_iter().try_for_each(|line| writeln!(out, "{line}")).and_then(|()| out.flush());
        if let Err(error) = written {
            tracing::error!(%error, "the audit log cannot be written");
        }
    }
}
