//! The audit log: one line of JSON per request, with the user, the verb, the target and the status of the response. It
//! never contains bodies, and so no secrets.

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

/// The header that carries the audit id of a request and of its response.
pub const AUDIT_ID_HEADER: HeaderName = HeaderName::from_static("audit-id");

/// Generates audit ids: UUIDs that differ from each other and from those of other servers. Only the first takes
/// random bytes from the kernel, which costs a system call; the others are computed from it.
pub struct AuditIdGenerator {
    first: u128,
    generated: AtomicU64,
}

impl AuditIdGenerator {
    pub fn with_random_start() -> Self {
        Self { first: uuid::Uuid::new_v4().as_u128(), generated: AtomicU64::new(0) }
    }

    /// The id that the client sent, if it has 1 to 64 visible ASCII characters. Otherwise a new one.
    pub fn id_for(&self, headers: &HeaderMap) -> HeaderValue {
        // An odd factor: its products modulo 2^128 with different numbers differ.
        const STRIDE: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        let sent =
            headers.get(AUDIT_ID_HEADER).filter(|id| id.to_str().is_ok_and(|id| !id.is_empty() && id.len() <= 64));
        sent.cloned().unwrap_or_else(|| {
            let number = self.generated.fetch_add(1, Ordering::Relaxed);
            let bits = self.first.wrapping_add(STRIDE.wrapping_mul(number.into()));
            let id = uuid::Builder::from_random_bytes(bits.to_be_bytes()).into_uuid();
            let mut buffer = uuid::Uuid::encode_buffer();
            HeaderValue::from_str(id.hyphenated().encode_lower(&mut buffer)).expect("letters, digits and hyphens")
        })
    }
}

/// The open audit log. A thread writes the lines, so that requests do not wait for the disk.
pub struct AuditLog(Sender<Value>);

impl AuditLog {
    /// Appends to the file; creates it, readable only by the owner, if it does not exist.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
        let (sender, lines) = channel();
        std::thread::Builder::new().name("cleat-audit".into()).spawn(move || write_lines(file, &lines))?;
        Ok(Self(sender))
    }

    /// Queues one line. `authenticated` is the caller that made the request, `effective` the one it was carried out
    /// as; they differ in case of impersonation. A caller is `None` if it was not authenticated or not authorized.
    pub fn record(
        &self,
        id: &str,
        authenticated: Option<&Caller>,
        effective: Option<&Caller>,
        request: &RequestInfo,
        code: StatusCode,
        duration: Duration,
    ) {
        let mut line = json!({
            "kind": "Event", "apiVersion": "audit.k8s.io/v1", "level": "Metadata", "stage": "ResponseComplete",
            "auditID": id, "requestURI": request.uri.to_string(), "verb": request.verb,
            "responseStatus": { "metadata": {}, "code": code.as_u16() },
            "stageTimestamp": jiff::Timestamp::now().to_string(),
            "latencyMicroseconds": u64::try_from(duration.as_micros()).unwrap_or(u64::MAX),
        });
        let impersonated = effective.filter(|caller| Some(*caller) != authenticated);
        for (key, caller) in [("user", authenticated), ("impersonatedUser", impersonated)] {
            if let Some(caller) = caller {
                line[key] = json!({ "username": caller.name, "groups": caller.groups });
            }
        }
        if let Some(target) = &request.target {
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
        // Fails only if the writing thread has panicked.
        let _ = self.0.send(line);
    }
}

/// Writes until the log is dropped. Lines that wait are written together, with one flush.
fn write_lines(file: File, lines: &Receiver<Value>) {
    let mut out = BufWriter::new(file);
    while let Ok(first) = lines.recv() {
        let batch = std::iter::once(first).chain(lines.try_iter());
        let result = batch.into_iter().try_for_each(|line| writeln!(out, "{line}")).and_then(|()| out.flush());
        if let Err(error) = result {
            tracing::error!(%error, "cannot write to the audit log");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_request_has_its_own_id_unless_the_client_sent_one() {
        let (ids, others) = (AuditIdGenerator::with_random_start(), AuditIdGenerator::with_random_start());
        let mut headers = HeaderMap::new();
        let mut unique = HashSet::new();
        for _ in 0..1000 {
            for ids in [&ids, &others] {
                let id = ids.id_for(&headers).to_str().unwrap().to_owned();
                let parsed = uuid::Uuid::parse_str(&id).unwrap();
                assert_eq!((parsed.get_version_num(), parsed.to_string()), (4, id.clone()));
                assert!(unique.insert(id));
            }
        }
        headers.insert(AUDIT_ID_HEADER, HeaderValue::from_static("mine"));
        assert_eq!(ids.id_for(&headers), "mine");
        for invalid in [String::new(), "x".repeat(65)] {
            headers.insert(AUDIT_ID_HEADER, HeaderValue::from_str(&invalid).unwrap());
            assert_eq!(ids.id_for(&headers).len(), 36, "{invalid}");
        }
    }
}
