//! Compresses one group of similar values and chooses their dictionary.

use std::sync::Arc;

use crate::packed::{Dictionary, Packed};

/// Shorter values are not compressed.
const MIN_VALUE_BYTES: usize = 128;
/// A dictionary consists of at most this many bytes from the start of a value.
const MAX_DICTIONARY_BYTES: usize = 16 << 10;
/// Number of values that pass uncompressed before the first dictionary is chosen.
const VALUES_BEFORE_FIRST_DICTIONARY: u32 = 8;
/// Number of values that are compressed before a dictionary's compression ratio is judged.
const VALUES_PER_REVIEW: u32 = 64;
/// A dictionary with a lower ratio of uncompressed to compressed bytes is replaced.
const MIN_COMPRESSION_RATIO: usize = 4;
/// A compressor that has had this many dictionaries keeps the last one: values of this group do not resemble each
/// other.
const MAX_DICTIONARIES: u32 = 16;
/// A larger scratch buffer is freed after use.
const MAX_RETAINED_BUFFER_BYTES: usize = 64 << 10;

/// Compresses values that resemble each other.
#[derive(Debug, Default)]
pub struct Compressor {
    dictionary: Option<Arc<Dictionary>>,
    /// Number of dictionaries chosen so far.
    dictionaries: u32,
    /// Values, their uncompressed and their stored bytes since the last review.
    values: u32,
    unpacked_bytes: usize,
    stored_bytes: usize,
    /// The next dictionary: the longest value since the last review, cut to `MAX_DICTIONARY_BYTES`.
    candidate: Vec<u8>,
    buffer: Vec<u8>,
}

impl Compressor {
    /// Continues with a dictionary that was chosen earlier. `dictionaries` is the number of dictionaries chosen so far,
    /// including this one.
    pub fn with_dictionary(dictionary: Arc<Dictionary>, dictionaries: u32) -> Self {
        Self { dictionary: Some(dictionary), dictionaries, ..Self::default() }
    }

    /// The dictionary that the next value is compressed with.
    pub fn dictionary(&self) -> Option<&Arc<Dictionary>> {
        self.dictionary.as_ref()
    }

    /// Compresses a value. Calls `id` at most once, for the id of a new dictionary, which serves the values after this
    /// one.
    pub fn pack(&mut self, value: &[u8], id: impl FnOnce() -> u32) -> Packed {
        if value.len() < MIN_VALUE_BYTES {
            return Packed::plain(value);
        }
        let packed = match &self.dictionary {
            Some(dictionary) => Packed::compress(dictionary, value, &mut self.buffer),
            None => Packed::plain(value),
        };
        self.values += 1;
        self.unpacked_bytes += value.len();
        self.stored_bytes += packed.stored_bytes().len();
        if value.len() > self.candidate.len() && self.candidate.len() < MAX_DICTIONARY_BYTES {
            self.candidate.clear();
            self.candidate.extend_from_slice(&value[..value.len().min(MAX_DICTIONARY_BYTES)]);
        }
        self.review(id);
        if self.buffer.len() > MAX_RETAINED_BUFFER_BYTES {
            self.buffer = Vec::new();
        }
        packed
    }

    /// Replaces the dictionary if enough values were compressed and their compression ratio is too low.
    fn review(&mut self, id: impl FnOnce() -> u32) {
        let due = if self.dictionary.is_some() { VALUES_PER_REVIEW } else { VALUES_BEFORE_FIRST_DICTIONARY };
        if self.values < due {
            return;
        }
        let is_poor = self.stored_bytes * MIN_COMPRESSION_RATIO > self.unpacked_bytes;
        if is_poor && self.dictionaries < MAX_DICTIONARIES {
            self.dictionaries += 1;
            self.dictionary = Some(Dictionary::new(id(), &self.candidate));
        }
        (self.values, self.unpacked_bytes, self.stored_bytes) = (0, 0, 0);
        self.candidate = Vec::new();
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::packed::tests::object;

    #[test]
    fn similar_values_compress_well() {
        let mut compressor = Compressor::default();
        let mut ids = 0..;
        let packed: Vec<Packed> = (0..200).map(|n| compressor.pack(&object(n), || ids.next().unwrap())).collect();
        for (n, packed) in packed.iter().enumerate() {
            assert_eq!(packed.unpack(), object(n), "{n}");
            assert_eq!(packed.unpacked_len() as usize, object(n).len());
        }
        assert!(packed[..8].iter().all(|p| p.dictionary().is_none()), "there is no dictionary yet");
        assert!(packed[8..].iter().all(|p| p.stored_bytes().len() * 4 < object(0).len() && p.dictionary().is_some()));
        assert_eq!(ids.next(), Some(1), "one dictionary serves all");
    }

    #[test]
    fn a_poor_dictionary_is_replaced_and_older_values_stay_readable() {
        let mut compressor = Compressor::default();
        let mut ids = 0..;
        let words: Vec<String> = (0..100).map(|n| (n * 104_729 % 99_991).to_string()).collect();
        let other = |n: usize| format!("{n}: {}", words.join(" "));
        let old: Vec<Packed> = (0..64).map(|n| compressor.pack(&object(n), || ids.next().unwrap())).collect();
        let new: Vec<Packed> = (0..300).map(|n| compressor.pack(other(n).as_bytes(), || ids.next().unwrap())).collect();
        let last = new.last().unwrap();
        assert!(last.stored_bytes().len() < 64 && last.dictionary().unwrap().id() > 0, "{last:?}");
        for (n, packed) in old.iter().enumerate() {
            assert_eq!(packed.unpack(), object(n));
        }
        for (n, packed) in new.iter().enumerate() {
            assert_eq!(packed.unpack(), other(n).as_bytes());
        }
    }

    #[test]
    fn random_values_stay_plain_and_the_number_of_dictionaries_is_limited() {
        let mut compressor = Compressor::default();
        let mut ids = 0..;
        let mut state = 1_u64;
        let mut noise = || {
            let mut byte = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            };
            (0..300).map(|_| byte()).collect::<Vec<u8>>()
        };
        for _ in 0..MAX_DICTIONARIES * VALUES_PER_REVIEW * 2 {
            let value = noise();
            let packed = compressor.pack(&value, || ids.next().unwrap());
            assert_eq!((packed.unpack(), packed.dictionary()), (value, None));
        }
        assert_eq!(ids.next(), Some(MAX_DICTIONARIES));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_value_unpacks_unchanged(
            values in vec(vec(prop_oneof![Just(b'a'), Just(b'{'), any::<u8>()], 0..600), 0..40)
        ) {
            let mut compressor = Compressor::default();
            let mut ids = 0..;
            for value in values {
                let packed = compressor.pack(&value, || ids.next().unwrap());
                prop_assert_eq!(packed.unpack(), value.clone());
                if let Some(dictionary) = packed.dictionary() {
                    let stored = Packed::from_stored(dictionary, packed.unpacked_len(), packed.stored_bytes());
                    prop_assert_eq!(stored.unwrap().1, value);
                }
            }
        }
    }
}
