//! What the rules made of a change once, they make of every change of its shape by the same writer, where the same is
//! owned: only times differ. A storm of like objects is judged once.

use std::fmt::Write as _;
use std::sync::Arc;

use jiff::Timestamp;

use super::entries::{Operation, Owners, UPDATERS};
use super::recorded::Recorded;
use super::shape;
use crate::memo::{Memo, Weighs};
use crate::part::ObjectPart as Part;

/// What was decided about a kind.
pub type Precedents = Memo<Arc<Precedent>>;

const TIME: &[u8] = b",\"time\":\"";
/// As long as a time is written.
const TIME_LENGTH: usize = "1970-01-01T00:00:00Z".len();
/// Where an owner without a time stands among the others.
const NEVER: &str = "1970-01-01T00:00:00Z";
/// Stands for the present while a precedent is made; smaller ones stand for the times before.
const NOW: usize = 59;

/// Everything that a decision depends on, and the times, on which none does.
pub struct Case<'a> {
    pub question: Vec<u8>,
    owners: &'a [u8],
    times: Vec<&'a str>,
}

impl<'a> Case<'a> {
    /// Nothing if there is anything unusual about it.
    pub fn of(writer: (Part, Operation, &str), before: &'a Recorded, old: &[u8], new: &[u8]) -> Option<Self> {
        let (part, operation, manager) = writer;
        let owners = before.text();
        let mut question = Vec::with_capacity(512 + owners.len());
        question.extend_from_slice(&[part as u8, operation as u8, u8::try_from(manager.len()).ok()?]);
        question.extend_from_slice(manager.as_bytes());
        let mut times = Vec::new();
        let mut begin = 0;
        // A quote inside a string is escaped: this is a key, and only entries have one of this name.
        for at in memchr::memmem::find_iter(owners, TIME) {
            let at = at + TIME.len();
            let time = owners.get(at..at + TIME_LENGTH).filter(|t| t.ends_with(b"Z") && t[0].is_ascii_digit())?;
            owners[at + TIME_LENGTH..].starts_with(b"\"}").then_some(())?;
            question.extend_from_slice(&owners[begin..at]);
            times.push(std::str::from_utf8(time).ok()?);
            begin = at + TIME_LENGTH;
        }
        question.extend_from_slice(&owners[begin..]);
        question.push(b'\n');
        shape::of_change(old, new, &mut question)?;
        (times.len() < UPDATERS).then_some(Self { question, owners, times })
    }

    /// The owners before, with a stand-in for each time.
    fn stand_ins(&self) -> Owners {
        let mut text = Vec::with_capacity(self.owners.len());
        let mut begin = 0;
        for (i, at) in memchr::memmem::find_iter(self.owners, TIME).enumerate() {
            let at = at + TIME.len();
            text.extend_from_slice(&self.owners[begin..at]);
            text.extend_from_slice(format!("1970-01-01T00:00:{:02}Z", i + 1).as_bytes());
            begin = at + TIME_LENGTH;
        }
        text.extend_from_slice(&self.owners[begin..]);
        if text.is_empty() { Owners::default() } else { Owners::decode(&text) }
    }
}

/// The owners after a change, without their times.
#[derive(Debug)]
pub struct Precedent(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    operation: Operation,
    /// Up to the time, or the whole entry if it has none.
    text: Box<str>,
    time: Moment,
}

#[derive(Clone, Copy, Debug)]
enum Moment {
    None,
    /// The one of this number before.
    Kept(usize),
    Now,
}

impl Precedent {
    /// From what the rules make of the owners before at a certain time. Nothing where times would have a say.
    pub fn of(case: &Case<'_>, judge: impl FnOnce(Owners, Timestamp) -> Owners) -> Option<Self> {
        let before = case.stand_ins();
        if before.iter().count() >= UPDATERS || before.is_empty() != case.owners.is_empty() {
            return None;
        }
        let mut after = judge(before, Timestamp::from_second(i64::try_from(NOW).ok()?).ok()?);
        after.sort_by_identity();
        let entry = |owner: &super::entries::Owner| {
            let mut text = owner.untimed()?;
            let time = match owner.time.map(|t| usize::try_from(t.as_second())) {
                None => Moment::None,
                Some(Ok(NOW)) => Moment::Now,
                Some(second) => Moment::Kept(second.ok()?.checked_sub(1)?),
            };
            if !matches!(time, Moment::None) {
                text.pop();
                text.push_str(",\"time\":\"");
            }
            Some(Entry { operation: owner.who.operation, text: text.into(), time })
        };
        after.iter().map(entry).collect::<Option<_>>().map(Self)
    }

    /// The decision for a case like the one it was made from.
    pub fn applied(&self, case: &Case<'_>, now: Timestamp) -> Recorded {
        if self.0.is_empty() {
            return Recorded::default();
        }
        let mut present = String::with_capacity(TIME_LENGTH);
        // Writing to a string does not fail.
        let _ = write!(present, "{}", now.strftime("%Y-%m-%dT%H:%M:%SZ"));
        let mut entries: Vec<(&Entry, Option<&str>)> = Vec::with_capacity(self.0.len());
        for entry in &self.0 {
            let time = match entry.time {
                Moment::None => None,
                Moment::Kept(number) => case.times.get(number).copied(),
                Moment::Now => Some(present.as_str()),
            };
            entries.push((entry, time));
        }
        // As owners are always written; among equals they are in order already.
        entries.sort_by_key(|(entry, time)| (entry.operation, time.unwrap_or(NEVER)));
        let length: usize = entries.iter().map(|(entry, _)| entry.text.len() + TIME_LENGTH + 3).sum();
        let mut out = Vec::with_capacity(length + 1);
        for (entry, time) in entries {
            out.push(if out.is_empty() { b'[' } else { b',' });
            out.extend_from_slice(entry.text.as_bytes());
            if let Some(time) = time {
                out.extend_from_slice(time.as_bytes());
                out.extend_from_slice(b"\"}");
            }
        }
        out.push(b']');
        Recorded::from_bytes(out)
    }
}

impl Weighs for Arc<Precedent> {
    fn weight(&self) -> usize {
        self.0.iter().map(|entry| size_of::<Entry>() + entry.text.len()).sum()
    }
}
