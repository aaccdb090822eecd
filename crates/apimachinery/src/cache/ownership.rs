//! Caches what a write makes of an object's managedFields. The result depends on the writer, on the managedFields before and
//! on the shape of the change, but not on the times in managedFields: these are inserted into the cached result. Many
//! similar writes then compute the field owners once.

use std::fmt::Write as _;
use std::sync::Arc;

use jiff::Timestamp;

use super::change_shape;
use crate::cache::two_generation::{CacheWeight, TwoGenerationCache};
use crate::field_ownership::RawManagedFields;
use crate::field_ownership::entries::{MAX_UPDATE_OWNERS, Operation, Owners};
use crate::part::ObjectPart;

/// The cached results of one kind.
pub type OwnershipCache = TwoGenerationCache<Arc<CachedOwnership>>;

/// The beginning of the member `time` of an entry.
const TIME: &[u8] = b",\"time\":\"";
/// The length of an encoded time.
const TIME_LENGTH: usize = "1970-01-01T00:00:00Z".len();
/// The sort key of an owner without a time.
const NEVER: &str = "1970-01-01T00:00:00Z";
/// The placeholder second for the time of the write while a cached result is computed. Smaller seconds are the placeholders
/// for the times in the managedFields before the write.
const NOW: usize = 59;

/// Everything that the result depends on, and the times, which are not part of the key.
pub struct OwnershipCacheKey<'a> {
    pub key: Vec<u8>,
    owners: &'a [u8],
    times: Vec<&'a str>,
}

impl<'a> OwnershipCacheKey<'a> {
    /// `None` if the result cannot be cached: an unusual form of the managedFields or of a body, a very long manager name, or
    /// so many owners that times decide which of them stay.
    pub fn of(
        writer: (ObjectPart, Operation, &str),
        before: &'a RawManagedFields,
        old: &[u8],
        new: &[u8],
    ) -> Option<Self> {
        let (part, operation, manager) = writer;
        let owners = before.as_bytes();
        let mut key = Vec::with_capacity(512 + owners.len());
        key.extend_from_slice(&[part as u8, operation as u8, u8::try_from(manager.len()).ok()?]);
        key.extend_from_slice(manager.as_bytes());
        let mut times = Vec::new();
        let mut begin = 0;
        // Inside strings quotes are escaped, so that this finds members only, and only entries have a member of this name.
        for member in memchr::memmem::find_iter(owners, TIME) {
            let start = member + TIME.len();
            let time = owners.get(start..start + TIME_LENGTH).filter(|t| t.ends_with(b"Z") && t[0].is_ascii_digit())?;
            owners[start + TIME_LENGTH..].starts_with(b"\"}").then_some(())?;
            key.extend_from_slice(&owners[begin..start]);
            times.push(std::str::from_utf8(time).ok()?);
            begin = start + TIME_LENGTH;
        }
        key.extend_from_slice(&owners[begin..]);
        key.push(b'\n');
        change_shape::append_change_shape(old, new, &mut key)?;
        (times.len() < MAX_UPDATE_OWNERS).then_some(Self { key, owners, times })
    }

    /// The owners before the write, with a placeholder for each time.
    fn with_placeholder_times(&self) -> Owners {
        let mut json = Vec::with_capacity(self.owners.len());
        let mut begin = 0;
        for (i, member) in memchr::memmem::find_iter(self.owners, TIME).enumerate() {
            let start = member + TIME.len();
            json.extend_from_slice(&self.owners[begin..start]);
            json.extend_from_slice(format!("1970-01-01T00:00:{:02}Z", i + 1).as_bytes());
            begin = start + TIME_LENGTH;
        }
        json.extend_from_slice(&self.owners[begin..]);
        if json.is_empty() { Owners::default() } else { Owners::decode(&json) }
    }
}

/// The owners after a write, without their times.
#[derive(Debug)]
pub struct CachedOwnership(Vec<CachedOwner>);

#[derive(Debug)]
struct CachedOwner {
    operation: Operation,
    /// The encoded entry up to its time, or the whole entry if it has no time.
    encoded: Box<str>,
    time: CachedTime,
}

#[derive(Clone, Copy, Debug)]
enum CachedTime {
    None,
    /// The time with this index in the managedFields before the write.
    Previous(usize),
    Now,
}

impl CachedOwnership {
    /// Calls `compute` with placeholder times. `None` if the result depends on times.
    pub fn of(key: &OwnershipCacheKey<'_>, compute: impl FnOnce(Owners, Timestamp) -> Owners) -> Option<Self> {
        let before = key.with_placeholder_times();
        if before.iter().count() >= MAX_UPDATE_OWNERS || before.is_empty() != key.owners.is_empty() {
            return None;
        }
        let mut after = compute(before, Timestamp::from_second(i64::try_from(NOW).ok()?).ok()?);
        after.sort_by_identity();
        let entry = |owner: &crate::field_ownership::entries::Owner| {
            let mut encoded = owner.encode_without_time()?;
            let time = match owner.time.map(|t| usize::try_from(t.as_second())) {
                None => CachedTime::None,
                Some(Ok(NOW)) => CachedTime::Now,
                Some(second) => CachedTime::Previous(second.ok()?.checked_sub(1)?),
            };
            if !matches!(time, CachedTime::None) {
                encoded.pop();
                encoded.push_str(",\"time\":\"");
            }
            Some(CachedOwner { operation: owner.id.operation, encoded: encoded.into(), time })
        };
        after.iter().map(entry).collect::<Option<_>>().map(Self)
    }

    /// The managedFields after a write with this key.
    pub fn at_times(&self, key: &OwnershipCacheKey<'_>, now: Timestamp) -> RawManagedFields {
        if self.0.is_empty() {
            return RawManagedFields::default();
        }
        let mut encoded_now = String::with_capacity(TIME_LENGTH);
        // Writing to a string does not fail.
        let _ = write!(encoded_now, "{}", now.strftime("%Y-%m-%dT%H:%M:%SZ"));
        let mut entries: Vec<(&CachedOwner, Option<&str>)> = Vec::with_capacity(self.0.len());
        for entry in &self.0 {
            let time = match entry.time {
                CachedTime::None => None,
                CachedTime::Previous(index) => key.times.get(index).copied(),
                CachedTime::Now => Some(encoded_now.as_str()),
            };
            entries.push((entry, time));
        }
        // The order of `Owners::encode`. The sort is stable, and the entries are already sorted by identity.
        entries.sort_by_key(|(entry, time)| (entry.operation, time.unwrap_or(NEVER)));
        let length: usize = entries.iter().map(|(entry, _)| entry.encoded.len() + TIME_LENGTH + 3).sum();
        let mut out = Vec::with_capacity(length + 1);
        for (entry, time) in entries {
            out.push(if out.is_empty() { b'[' } else { b',' });
            out.extend_from_slice(entry.encoded.as_bytes());
            if let Some(time) = time {
                out.extend_from_slice(time.as_bytes());
                out.extend_from_slice(b"\"}");
            }
        }
        out.push(b']');
        RawManagedFields::from_bytes(out)
    }
}

impl CacheWeight for Arc<CachedOwnership> {
    fn bytes(&self) -> usize {
        self.0.iter().map(|entry| size_of::<CachedOwner>() + entry.encoded.len()).sum()
    }
}
