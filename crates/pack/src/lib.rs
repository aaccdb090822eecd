//! Texts that resemble each other, kept small.
//!
//! Objects of one kind differ in names, times and little else. Each is kept as what distinguishes it from a dictionary of
//! its kind: a few per cent of its length, made and undone in about a microsecond. [`Compressor`] learns the dictionaries from the
//! texts it is given; a dictionary never changes, so that a [`Packed`] can be read for ever, also from a disk.

mod maybe_packed;

use std::sync::Arc;

use lz4_flex::block;
pub use maybe_packed::{MaybePacked, Packable};

/// Shorter texts are not worth it.
const SHORTEST: usize = 128;
/// More of a text than this does not become a dictionary.
const MAX_DICTIONARY_BYTES: usize = 16 << 10;
/// So many texts are seen before the first dictionary is chosen.
const FIRST_LOOK: u32 = 8;
/// So many texts are packed before the dictionary is judged.
const NEXT_LOOK: u32 = 64;
/// A dictionary has served well if what was packed with it is this many times smaller.
const GOOD: usize = 4;
/// Texts that resemble no dictionary are not worth a search without end.
const MAX_DICTIONARIES: u32 = 16;

/// Room that is kept for the next text.
const LARGEST_ROOM: usize = 64 << 10;

/// What texts of one sort are compared with.
#[derive(Debug, PartialEq, Eq)]
pub struct Dictionary {
    id: u32,
    text: Box<[u8]>,
}

impl Dictionary {
    /// A dictionary that was stored.
    pub fn known(id: u32, text: &[u8]) -> Arc<Self> {
        Arc::new(Self { id, text: text.into() })
    }

    pub fn id(&self) -> u32 {
        self.id
    }

    pub fn text(&self) -> &[u8] {
        &self.text
    }
}

/// One text. Clones share it.
#[derive(Clone, Debug)]
pub struct Packed {
    dictionary: Option<Arc<Dictionary>>,
    /// Of the text.
    length: u32,
    /// The text itself where there is no dictionary.
    bytes: Arc<[u8]>,
}

impl Packed {
    /// The text as it is.
    pub fn plain(text: &[u8]) -> Self {
        Self { dictionary: None, length: length(text), bytes: text.into() }
    }

    /// What was stored of a text, and the text; nothing if that is no way to store one.
    pub fn read(dictionary: &Arc<Dictionary>, length: u32, bytes: &[u8]) -> Option<(Self, Vec<u8>)> {
        let text = unpacked(dictionary, length, bytes)?;
        Some((Self { dictionary: Some(dictionary.clone()), length, bytes: bytes.into() }, text))
    }

    pub fn text(&self) -> Vec<u8> {
        match &self.dictionary {
            None => self.bytes.to_vec(),
            // Every value was made by `Compressor::pack` or tried out by `read`.
            Some(dictionary) => unpacked(dictionary, self.length, &self.bytes).expect("a packed text can be unpacked"),
        }
    }

    /// The text where it is kept as it is.
    pub fn whole(&self) -> Option<Arc<[u8]>> {
        self.dictionary.is_none().then(|| self.bytes.clone())
    }

    /// The dictionary it is packed with, if it is packed.
    pub fn dictionary(&self) -> Option<&Arc<Dictionary>> {
        self.dictionary.as_ref()
    }

    /// What is kept of it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The length of the text.
    pub fn length(&self) -> u32 {
        self.length
    }
}

impl PartialEq for Packed {
    fn eq(&self, other: &Self) -> bool {
        self.length == other.length && self.text() == other.text()
    }
}

fn length(text: &[u8]) -> u32 {
    // Objects are limited to megabytes long before.
    u32::try_from(text.len()).expect("a text of less than 4 GiB")
}

fn unpacked(dictionary: &Dictionary, length: u32, bytes: &[u8]) -> Option<Vec<u8>> {
    // What is packed is never this much smaller: a length out of nowhere must not take all memory.
    let length = usize::try_from(length).ok().filter(|length| *length <= bytes.len().saturating_mul(256) + 1024)?;
    let mut text = vec![0; length];
    let written = block::decompress_into_with_dict(bytes, &mut text, &dictionary.text).ok()?;
    (written == length).then_some(text)
}

/// Texts of one sort, and the dictionary that suits them.
#[derive(Debug, Default)]
pub struct Compressor {
    dictionary: Option<Arc<Dictionary>>,
    /// How many dictionaries there were.
    dictionaries: u32,
    /// Since the last look: how many texts, their length, what was kept of them, and the longest that can be a dictionary.
    seen: u32,
    taken: usize,
    kept: usize,
    longest: Vec<u8>,
    room: Vec<u8>,
}

impl Compressor {
    /// The sort of texts that were packed with this dictionary before.
    pub fn resumed(dictionary: Arc<Dictionary>, dictionaries: u32) -> Self {
        Self { dictionary: Some(dictionary), dictionaries, ..Self::default() }
    }

    /// The dictionary that texts are packed with now.
    pub fn dictionary(&self) -> Option<&Arc<Dictionary>> {
        self.dictionary.as_ref()
    }

    /// Packs a text. `id` names the next dictionary, and is called only if this text has led to one.
    pub fn pack(&mut self, text: &[u8], id: impl FnOnce() -> u32) -> Packed {
        if text.len() < SHORTEST {
            return Packed::plain(text);
        }
        let packed = match &self.dictionary {
            Some(dictionary) => pack(dictionary, text, &mut self.room),
            None => Packed::plain(text),
        };
        self.seen += 1;
        self.taken += text.len();
        self.kept += packed.bytes.len();
        if text.len() > self.longest.len() && self.longest.len() < MAX_DICTIONARY_BYTES {
            self.longest.clear();
            self.longest.extend_from_slice(&text[..text.len().min(MAX_DICTIONARY_BYTES)]);
        }
        self.look(id);
        if self.room.len() > LARGEST_ROOM {
            self.room = Vec::new();
        }
        packed
    }

    fn look(&mut self, id: impl FnOnce() -> u32) {
        let due = if self.dictionary.is_some() { NEXT_LOOK } else { FIRST_LOOK };
        if self.seen < due {
            return;
        }
        if self.kept * GOOD > self.taken && self.dictionaries < MAX_DICTIONARIES {
            self.dictionaries += 1;
            self.dictionary = Some(Dictionary::known(id(), &self.longest));
        }
        (self.seen, self.taken, self.kept) = (0, 0, 0);
        self.longest = Vec::new();
    }
}

fn pack(dictionary: &Arc<Dictionary>, text: &[u8], room: &mut Vec<u8>) -> Packed {
    room.resize(room.len().max(block::get_maximum_output_size(text.len())), 0);
    match block::compress_into_with_dict(text, room, &dictionary.text) {
        Ok(kept) if kept < text.len() / 4 * 3 => {
            Packed { dictionary: Some(dictionary.clone()), length: length(text), bytes: room[..kept].into() }
        }
        Ok(_) | Err(_) => Packed::plain(text),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn object(n: usize) -> Vec<u8> {
        let words = "metadata labels annotations finalizers managedFields spec accessModes resources requests storage";
        format!(r#"{{"name":"claim-{n}","uid":"{:032x}","body":"{words} {words}"}}"#, n * 7919).into_bytes()
    }

    #[test]
    fn texts_that_differ_in_little_take_little_room() {
        let mut sort = Compressor::default();
        let mut ids = 0..;
        let packed: Vec<Packed> = (0..200).map(|n| sort.pack(&object(n), || ids.next().unwrap())).collect();
        for (n, packed) in packed.iter().enumerate() {
            assert_eq!(packed.text(), object(n), "{n}");
            assert_eq!(packed.length() as usize, object(n).len());
        }
        assert!(packed[..8].iter().all(|p| p.dictionary().is_none()), "there is nothing to compare with yet");
        assert!(packed[8..].iter().all(|p| p.bytes().len() * 4 < object(0).len() && p.dictionary().is_some()));
        assert_eq!(ids.next(), Some(1), "one dictionary serves all");
    }

    #[test]
    fn a_sample_that_no_longer_suits_is_replaced_and_what_was_packed_stays_readable() {
        let mut sort = Compressor::default();
        let mut ids = 0..;
        let words: Vec<String> = (0..100).map(|n| (n * 104_729 % 99_991).to_string()).collect();
        let other = |n: usize| format!("{n}: {}", words.join(" "));
        let old: Vec<Packed> = (0..64).map(|n| sort.pack(&object(n), || ids.next().unwrap())).collect();
        let new: Vec<Packed> = (0..300).map(|n| sort.pack(other(n).as_bytes(), || ids.next().unwrap())).collect();
        let last = new.last().unwrap();
        assert!(last.bytes().len() < 64 && last.dictionary().unwrap().id() > 0, "{last:?}");
        for (n, packed) in old.iter().enumerate() {
            assert_eq!(packed.text(), object(n));
        }
        for (n, packed) in new.iter().enumerate() {
            assert_eq!(packed.text(), other(n).as_bytes());
        }
    }

    #[test]
    fn what_resembles_nothing_is_kept_as_it_is_and_searched_for_only_so_long() {
        let mut sort = Compressor::default();
        let mut ids = 0..;
        let mut state = 1_u64;
        let mut noise = || {
            let mut byte = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            };
            (0..300).map(|_| byte()).collect::<Vec<u8>>()
        };
        for _ in 0..MAX_DICTIONARIES * NEXT_LOOK * 2 {
            let text = noise();
            let packed = sort.pack(&text, || ids.next().unwrap());
            assert_eq!((packed.text(), packed.dictionary()), (text, None));
        }
        assert_eq!(ids.next(), Some(MAX_DICTIONARIES));
    }

    #[test]
    fn damage_is_noticed_or_harmless_and_never_takes_all_memory() {
        let dictionary = Dictionary::known(3, &object(1));
        let packed = pack(&dictionary, &object(2), &mut Vec::new());
        assert!(packed.dictionary().is_some());
        let (again, text) = Packed::read(&dictionary, packed.length(), packed.bytes()).unwrap();
        assert_eq!((text, again), (object(2), packed.clone()));
        assert!(Packed::read(&dictionary, u32::MAX, packed.bytes()).is_none());
        assert!(Packed::read(&dictionary, packed.length() + 1, packed.bytes()).is_none());
        assert!(Packed::read(&dictionary, packed.length(), &packed.bytes()[1..]).is_none());
        for at in 0..packed.bytes().len() {
            let mut bytes = packed.bytes().to_vec();
            bytes[at] ^= 0x55;
            let _ = Packed::read(&dictionary, packed.length(), &bytes);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_text_comes_back(texts in vec(vec(prop_oneof![Just(b'a'), Just(b'{'), any::<u8>()], 0..600), 0..40)) {
            let mut sort = Compressor::default();
            let mut ids = 0..;
            for text in texts {
                let packed = sort.pack(&text, || ids.next().unwrap());
                prop_assert_eq!(packed.text(), text.clone());
                if let Some(dictionary) = packed.dictionary() {
                    let (_, read) = Packed::read(dictionary, packed.length(), packed.bytes()).unwrap();
                    prop_assert_eq!(read, text);
                }
            }
        }
    }
}
