//! A batch as it is written to the log: mark, number of the use of the file, first and last revision, length and digest, then
//! dictionaries and records, one after another.

use ring::digest;

use crate::Revision;

/// What a disk writes whole or not at all.
pub(super) const GRAIN: usize = 512;
const MARK: &[u8; 8] = b"cleat.l1";
const DIGEST: usize = 32;
pub(super) const HEAD: usize = 8 * 5 + DIGEST;

/// A batch on its way out.
#[derive(Default)]
pub(super) struct Frame {
    /// Begins with room for the head.
    bytes: Vec<u8>,
}

/// One thing in a frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item<'a> {
    Dictionary { sort: &'a str, id: u32, text: &'a [u8] },
    Stored { key: &'a str, record: &'a [u8] },
    Removed { key: &'a str },
}

impl Frame {
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.resize(HEAD, 0);
    }

    pub(super) fn push(&mut self, item: &Item<'_>) {
        match item {
            Item::Dictionary { sort, id, text } => {
                self.bytes.push(b's');
                self.part(sort.as_bytes());
                self.bytes.extend_from_slice(&id.to_le_bytes());
                self.part(text);
            }
            Item::Stored { key, record } => {
                self.bytes.push(b'+');
                self.part(key.as_bytes());
                self.part(record);
            }
            Item::Removed { key } => {
                self.bytes.push(b'-');
                self.part(key.as_bytes());
            }
        }
    }

    fn part(&mut self, bytes: &[u8]) {
        // A batch is some megabytes at most.
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(&length.to_le_bytes());
        self.bytes.extend_from_slice(bytes);
    }

    /// Completes the head; what is to be written, up to the next grain.
    pub(super) fn sealed(&mut self, usage: u64, first: Revision, last: Revision) -> &[u8] {
        let length = (self.bytes.len() - HEAD) as u64;
        self.bytes[..8].copy_from_slice(MARK);
        for (n, number) in [usage, first, last, length].into_iter().enumerate() {
            self.bytes[8 + 8 * n..16 + 8 * n].copy_from_slice(&number.to_le_bytes());
        }
        let digest = digest_of(&self.bytes);
        self.bytes[HEAD - DIGEST..HEAD].copy_from_slice(digest.as_ref());
        self.bytes.resize(self.bytes.len().next_multiple_of(GRAIN), 0);
        &self.bytes
    }
}

/// Of a frame without what follows its body.
fn digest_of(frame: &[u8]) -> digest::Digest {
    let mut digest = digest::Context::new(&digest::SHA256);
    digest.update(&frame[..HEAD - DIGEST]);
    digest.update(&frame[HEAD..]);
    digest.finish()
}

/// A batch that was found.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) last: Revision,
    pub(super) first: Revision,
    pub(super) usage: u64,
    body: Vec<u8>,
}

impl Found {
    /// What is in it; nothing follows what cannot be read.
    pub(super) fn items(&self) -> impl Iterator<Item = Option<Item<'_>>> {
        let mut rest = &self.body[..];
        std::iter::from_fn(move || {
            let (kind, after) = rest.split_first()?;
            let read = item(*kind, after);
            rest = read.as_ref().map_or(&[], |(_, rest)| rest);
            Some(read.map(|(item, _)| item))
        })
    }
}

fn item(kind: u8, bytes: &[u8]) -> Option<(Item<'_>, &[u8])> {
    let (name, rest) = part(bytes)?;
    let name = str::from_utf8(name).ok()?;
    match kind {
        b's' => {
            let (id, rest) = rest.split_first_chunk()?;
            let (text, rest) = part(rest)?;
            Some((Item::Dictionary { sort: name, id: u32::from_le_bytes(*id), text }, rest))
        }
        b'+' => part(rest).map(|(record, rest)| (Item::Stored { key: name, record }, rest)),
        b'-' => Some((Item::Removed { key: name }, rest)),
        _ => None,
    }
}

fn part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}

/// The frame at the beginning of these bytes, if there is a whole one, and its size.
pub(super) fn whole(bytes: &[u8]) -> Option<(Found, usize)> {
    let head = bytes.get(..HEAD).filter(|head| head.starts_with(MARK))?;
    let number = |n: usize| head[8 + 8 * n..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let (usage, first, last) = (number(0), number(1), number(2));
    let size = usize::try_from(number(3)).ok()?.checked_add(HEAD)?;
    let frame = bytes.get(..size)?;
    (digest_of(frame).as_ref() == &head[HEAD - DIGEST..])
        .then(|| (Found { first, last, usage, body: frame[HEAD..].to_vec() }, size.next_multiple_of(GRAIN)))
}
