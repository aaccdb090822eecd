//! The audit log: one line of JSON per request, saying who did what and how it ended. Bodies never come here, and so no
//! secret does.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde_json::{Value, json};

use crate::authenticate::Caller;
use crate::request_info::RequestInfo;

pub const ID: HeaderName = HeaderName::from_static("audit-id");

/// Names for requests, each used once. Whoever asks the kernel for every one waits for it every time.
pub struct Ids {
    first: u128,
    given: AtomicU64,
}

impl Ids {
    pub fn new() -> Self {
        Self { first: uuid::Uuid::new_v4().as_u128(), given: AtomicU64::new(0) }
    }

    /// The one a client gave the request, or a new one.
    pub fn of(&self, headers: &HeaderMap) -> HeaderValue {
        // Odd, so that no two products are the same.
        const STRIDE: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        let given = headers.get(ID).filter(|id| id.to_str().is_ok_and(|id| !id.is_empty() && id.len() <= 64));
        given.cloned().unwrap_or_else(|| {
            let number = self.given.fetch_add(1, Ordering::Relaxed);
            let bits = self.first.wrapping_add(STRIDE.wrapping_mul(number.into()));
            let id = uuid::Builder::from_random_bytes(bits.to_be_bytes()).into_uuid();
            let mut text = uuid::Uuid::encode_buffer();
            HeaderValue::from_str(id.hyphenated().encode_lower(&mut text)).expect("letters, digits and hyphens")
        })
    }
}

pub struct Audit(Sender<Value>);

impl Audit {
    /// Appends to the file, which only the owner can read.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
        let (sender, lines) = channel();
        std::thread::Builder::new().name("cleat-audit".into()).spawn(move || write(file, &lines))?;
        Ok(Self(sender))
    }

    /// `known` is who asked, `acted` whom it was done for; they differ if one impersonates the other.
    pub fn record(
        &self,
        id: &str,
        known: Option<&Caller>,
        acted: Option<&Caller>,
        asked: &RequestInfo,
        code: StatusCode,
        took: Duration,
    ) {
        let mut line = json!({
            "kind": "Event", "apiVersion": "audit.k8s.io/v1", "level": "Metadata", "stage": "ResponseComplete",
            "auditID": id, "requestURI": asked.uri.to_string(), "verb": asked.verb,
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_request_has_its_own_id_unless_it_brought_one() {
        let (ids, others) = (Ids::new(), Ids::new());
        let mut headers = HeaderMap::new();
        let mut seen = HashSet::new();
        for _ in 0..1000 {
            for ids in [&ids, &others] {
                let id = ids.of(&headers).to_str().unwrap().to_owned();
                let parsed = uuid::Uuid::parse_str(&id).unwrap();
                assert_eq!((parsed.get_version_num(), parsed.to_string()), (4, id.clone()));
                assert!(seen.insert(id));
            }
        }
        headers.insert(ID, HeaderValue::from_static("mine"));
        assert_eq!(ids.of(&headers), "mine");
        for unfit in [String::new(), "x".repeat(65)] {
            headers.insert(ID, HeaderValue::from_str(&unfit).unwrap());
            assert_eq!(ids.of(&headers).len(), 36, "{unfit}");
        }
    }
}
