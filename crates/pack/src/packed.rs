//! One value, compressed with a dictionary or plain.

use std::sync::Arc;

use lz4_flex::block;

/// LZ4 compresses at most about 255 to 1. A stored length above this ratio is damage, and must not allocate memory.
const MAX_COMPRESSION_RATIO: usize = 256;

/// Bytes that similar values are compressed against. A dictionary never changes.
#[derive(Debug, PartialEq, Eq)]
pub struct Dictionary {
    id: u32,
    bytes: Box<[u8]>,
}

impl Dictionary {
    pub fn new(id: u32, bytes: &[u8]) -> Arc<Self> {
        Arc::new(Self { id, bytes: bytes.into() })
    }

    pub fn id(&self) -> u32 {
        self.id
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// An immutable value, compressed if that is worth it. Clones share the bytes.
#[derive(Clone, Debug)]
pub struct Packed {
    dictionary: Option<Arc<Dictionary>>,
    /// Length of the uncompressed value.
    length: u32,
    /// The compressed bytes, or the value itself if there is no dictionary.
    bytes: Arc<[u8]>,
}

impl Packed {
    /// Holds the value uncompressed.
    pub fn plain(value: &[u8]) -> Self {
        Self { dictionary: None, length: length(value), bytes: value.into() }
    }

    /// Compresses the value, or holds it uncompressed if less than a quarter would be saved. `buffer` is scratch space;
    /// it grows as needed.
    pub(crate) fn compress(dictionary: &Arc<Dictionary>, value: &[u8], buffer: &mut Vec<u8>) -> Self {
        buffer.resize(buffer.len().max(block::get_maximum_output_size(value.len())), 0);
        match block::compress_into_with_dict(value, buffer, &dictionary.bytes) {
            Ok(size) if size < value.len() / 4 * 3 => {
                Self { dictionary: Some(dictionary.clone()), length: length(value), bytes: buffer[..size].into() }
            }
            Ok(_) | Err(_) => Self::plain(value),
        }
    }

    /// Restores a compressed value from its stored form: its dictionary, its uncompressed length and its compressed
    /// bytes. Returns it together with the uncompressed value, or `None` if the bytes do not decompress to that length.
    pub fn from_stored(dictionary: &Arc<Dictionary>, length: u32, bytes: &[u8]) -> Option<(Self, Vec<u8>)> {
        let value = decompress(dictionary, length, bytes)?;
        Some((Self { dictionary: Some(dictionary.clone()), length, bytes: bytes.into() }, value))
    }

    /// Returns a copy of the uncompressed value.
    pub fn unpack(&self) -> Vec<u8> {
        match &self.dictionary {
            None => self.bytes.to_vec(),
            Some(dictionary) => {
                // `compress` made the bytes, or `from_stored` has decompressed them once.
                decompress(dictionary, self.length, &self.bytes).expect("a packed value can be unpacked")
            }
        }
    }

    /// Returns the value without copying it if it is not compressed.
    pub fn as_plain(&self) -> Option<Arc<[u8]>> {
        self.dictionary.is_none().then(|| self.bytes.clone())
    }

    /// The dictionary that the value is compressed with; `None` if the value is plain.
    pub fn dictionary(&self) -> Option<&Arc<Dictionary>> {
        self.dictionary.as_ref()
    }

    /// The compressed bytes, or the value itself if it is plain.
    pub fn stored_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Length of the uncompressed value in bytes.
    pub fn unpacked_len(&self) -> u32 {
        self.length
    }
}

/// Compares the uncompressed values.
impl PartialEq for Packed {
    fn eq(&self, other: &Self) -> bool {
        self.length == other.length && self.unpack() == other.unpack()
    }
}

fn length(value: &[u8]) -> u32 {
    // The API server limits request bodies to a few megabytes.
    u32::try_from(value.len()).expect("a value of less than 4 GiB")
}

fn decompress(dictionary: &Dictionary, length: u32, bytes: &[u8]) -> Option<Vec<u8>> {
    let max = bytes.len().saturating_mul(MAX_COMPRESSION_RATIO) + 1024;
    let length = usize::try_from(length).ok().filter(|length| *length <= max)?;
    let mut value = vec![0; length];
    let written = block::decompress_into_with_dict(bytes, &mut value, &dictionary.bytes).ok()?;
    (written == length).then_some(value)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn object(n: usize) -> Vec<u8> {
        let words = "metadata labels annotations finalizers managedFields spec accessModes resources requests storage";
        format!(r#"{{"name":"claim-{n}","uid":"{:032x}","body":"{words} {words}"}}"#, n * 7919).into_bytes()
    }

    #[test]
    fn damage_is_noticed_or_harmless_and_never_allocates_without_bound() {
        let dictionary = Dictionary::new(3, &object(1));
        let packed = Packed::compress(&dictionary, &object(2), &mut Vec::new());
        assert!(packed.dictionary().is_some());
        let (again, value) = Packed::from_stored(&dictionary, packed.unpacked_len(), packed.stored_bytes()).unwrap();
        assert_eq!((value, again), (object(2), packed.clone()));
        assert!(Packed::from_stored(&dictionary, u32::MAX, packed.stored_bytes()).is_none());
        assert!(Packed::from_stored(&dictionary, packed.unpacked_len() + 1, packed.stored_bytes()).is_none());
        assert!(Packed::from_stored(&dictionary, packed.unpacked_len(), &packed.stored_bytes()[1..]).is_none());
        for at in 0..packed.stored_bytes().len() {
            let mut bytes = packed.stored_bytes().to_vec();
            bytes[at] ^= 0x55;
            let _ = Packed::from_stored(&dictionary, packed.unpacked_len(), &bytes);
        }
    }
}
