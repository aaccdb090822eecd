//! The encoding of one batch in the log.
//!
//! A frame is a header (magic, generation of the file, first and last revision, length of the body, SHA-256 digest) and
//! a body of dictionaries and records. Frames begin at multiples of [`SECTOR_BYTES`]. Integers are little-endian.

use ring::digest;

use crate::entry::Revision;

/// The unit that a disk writes completely or not at all.
pub(super) const SECTOR_BYTES: usize = 512;
const MAGIC: &[u8; 8] = b"cleat.l1";
const DIGEST_BYTES: usize = 32;
pub(super) const HEADER_BYTES: usize = 8 * 5 + DIGEST_BYTES;

/// Encodes a batch. The buffer is reused for the next batch.
#[derive(Default)]
pub(super) struct FrameBuilder {
    /// The header's bytes are zero until `finish`.
    bytes: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum FrameItem<'a> {
    Dictionary { group: &'a str, id: u32, bytes: &'a [u8] },
    Stored { key: &'a str, record: &'a [u8] },
    Removed { key: &'a str },
}

impl FrameBuilder {
    /// Starts a new batch.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.resize(HEADER_BYTES, 0);
    }

    pub(super) fn push(&mut self, item: &FrameItem<'_>) {
        match item {
            FrameItem::Dictionary { group, id, bytes } => {
                self.bytes.push(b's');
                self.push_field(group.as_bytes());
                self.bytes.extend_from_slice(&id.to_le_bytes());
                self.push_field(bytes);
            }
            FrameItem::Stored { key, record } => {
                self.bytes.push(b'+');
                self.push_field(key.as_bytes());
                self.push_field(record);
            }
            FrameItem::Removed { key } => {
                self.bytes.push(b'-');
                self.push_field(key.as_bytes());
            }
        }
    }

    fn push_field(&mut self, bytes: &[u8]) {
        // The writer limits a batch to some megabytes.
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(&length.to_le_bytes());
        self.bytes.extend_from_slice(bytes);
    }

    /// Fills in the header and returns the frame, padded to a multiple of `SECTOR_BYTES`.
    pub(super) fn finish(&mut self, generation: u64, first: Revision, last: Revision) -> &[u8] {
        let length = (self.bytes.len() - HEADER_BYTES) as u64;
        self.bytes[..8].copy_from_slice(MAGIC);
        for (n, number) in [generation, first, last, length].into_iter().enumerate() {
            self.bytes[8 + 8 * n..16 + 8 * n].copy_from_slice(&number.to_le_bytes());
        }
        let digest = digest_of(&self.bytes);
        self.bytes[HEADER_BYTES - DIGEST_BYTES..HEADER_BYTES].copy_from_slice(digest.as_ref());
        self.bytes.resize(self.bytes.len().next_multiple_of(SECTOR_BYTES), 0);
        &self.bytes
    }
}

/// The digest over header and body. `frame` ends with the body, without padding.
fn digest_of(frame: &[u8]) -> digest::Digest {
    let mut digest = digest::Context::new(&digest::SHA256);
    digest.update(&frame[..HEADER_BYTES - DIGEST_BYTES]);
    digest.update(&frame[HEADER_BYTES..]);
    digest.finish()
}

/// A batch that was read from the log.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) last: Revision,
    pub(super) first: Revision,
    pub(super) generation: u64,
    body: Vec<u8>,
}

impl Frame {
    /// Parses the frame at the beginning of these bytes. Returns it with its padded size, or `None` if there is no
    /// complete frame with a matching digest.
    pub(super) fn parse(bytes: &[u8]) -> Option<(Self, usize)> {
        let header = bytes.get(..HEADER_BYTES).filter(|header| header.starts_with(MAGIC))?;
        let number = |n: usize| header[8 + 8 * n..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let (generation, first, last) = (number(0), number(1), number(2));
        let size = usize::try_from(number(3)).ok()?.checked_add(HEADER_BYTES)?;
        let frame = bytes.get(..size)?;
        (digest_of(frame).as_ref() == &header[HEADER_BYTES - DIGEST_BYTES..]).then(|| {
            let frame = Self { first, last, generation, body: frame[HEADER_BYTES..].to_vec() };
            (frame, size.next_multiple_of(SECTOR_BYTES))
        })
    }

    /// The items in the order in which they were pushed. `None` stands for an item that cannot be parsed, and is the
    /// last.
    pub(super) fn items(&self) -> impl Iterator<Item = Option<FrameItem<'_>>> {
        let mut rest = &self.body[..];
        std::iter::from_fn(move || {
            let (kind, after) = rest.split_first()?;
            let parsed = parse_item(*kind, after);
            rest = parsed.as_ref().map_or(&[], |(_, rest)| rest);
            Some(parsed.map(|(item, _)| item))
        })
    }
}

/// Returns the item and the bytes after it.
fn parse_item(kind: u8, bytes: &[u8]) -> Option<(FrameItem<'_>, &[u8])> {
    let (name, rest) = split_field(bytes)?;
    let name = str::from_utf8(name).ok()?;
    match kind {
        b's' => {
            let (id, rest) = rest.split_first_chunk()?;
            let (bytes, rest) = split_field(rest)?;
            Some((FrameItem::Dictionary { group: name, id: u32::from_le_bytes(*id), bytes }, rest))
        }
        b'+' => split_field(rest).map(|(record, rest)| (FrameItem::Stored { key: name, record }, rest)),
        b'-' => Some((FrameItem::Removed { key: name }, rest)),
        _ => None,
    }
}

fn split_field(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}
