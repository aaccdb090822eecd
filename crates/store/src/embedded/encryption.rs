//! Encryption at rest: values under configured key prefixes are encrypted with AES-256-GCM before they are written to
//! disk. In memory, and for readers and watches, they are plain.
//!
//! The first encryption key encrypts; all of them decrypt. When a store is opened, every covered value that is not
//! encrypted with the first key is encrypted again. To replace a key, an administrator puts the new one first, starts
//! once, and removes the old one.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};

const KEY_BYTES: usize = 32;
/// A key's id is the beginning of its SHA-256 digest. It distinguishes a wrong key from a damaged value.
const KEY_ID_BYTES: usize = 8;

#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error("cannot read the encryption keys in {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{path} has no key: it needs a line with 32 random bytes in base64, for example from `head -c32 /dev/urandom | base64`"
    )]
    Empty { path: PathBuf },
    #[error("line {line} of {path} is no key: it must be 32 bytes in base64")]
    Malformed { path: PathBuf, line: usize },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum DecryptError {
    #[error("it is encrypted with a key that was not given")]
    UnknownKey,
    #[error("it does not decrypt: the value is damaged")]
    Damaged,
}

/// Encrypts and decrypts the values under its prefixes.
pub struct Encryptor {
    /// Each key with its id; the first one encrypts.
    keys: Vec<([u8; KEY_ID_BYTES], LessSafeKey)>,
    prefixes: Vec<String>,
    random: SystemRandom,
}

impl fmt::Debug for Encryptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encryptor").field("prefixes", &self.prefixes).finish_non_exhaustive()
    }
}

impl Encryptor {
    /// Reads encryption keys from a file: one per line in base64, the key to encrypt with first. Empty lines and lines
    /// that begin with `#` are skipped.
    pub fn read(path: &Path, prefixes: &[&str]) -> Result<Self, KeyFileError> {
        let text = fs::read_to_string(path).map_err(|source| KeyFileError::Read { path: path.into(), source })?;
        let mut keys = Vec::new();
        for (i, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let malformed = || KeyFileError::Malformed { path: path.into(), line: i + 1 };
            let bytes = decode_base64(line).filter(|b| b.len() == KEY_BYTES).ok_or_else(malformed)?;
            let key = UnboundKey::new(&AES_256_GCM, &bytes).map_err(|_| malformed())?;
            let mut id = [0; KEY_ID_BYTES];
            id.copy_from_slice(&digest(&SHA256, &bytes).as_ref()[..KEY_ID_BYTES]);
            keys.push((id, LessSafeKey::new(key)));
        }
        if keys.is_empty() {
            return Err(KeyFileError::Empty { path: path.into() });
        }
        let prefixes = prefixes.iter().map(|p| (*p).to_owned()).collect();
        Ok(Self { keys, prefixes, random: SystemRandom::new() })
    }

    /// Returns true if the value of this storage key must be encrypted.
    pub(super) fn covers(&self, key: &str) -> bool {
        self.prefixes.iter().any(|prefix| key.starts_with(prefix))
    }

    /// Returns true if the values of some storage keys of this group (see `packer::group_of`) must be encrypted.
    pub(super) fn covers_some_of(&self, group: &str) -> bool {
        let directory = format!("{group}/");
        self.prefixes.iter().any(|prefix| prefix.starts_with(&directory) || directory.starts_with(prefix))
    }

    /// Returns key id, nonce and ciphertext. They decrypt only under the same storage key. `None` if there are no
    /// random bytes for the nonce.
    pub(super) fn encrypt(&self, key: &str, value: &[u8]) -> Option<Vec<u8>> {
        let (id, cipher) = self.keys.first()?;
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).ok()?;
        let mut ciphertext = value.to_vec();
        let associated = Aad::from(key.as_bytes());
        cipher.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), associated, &mut ciphertext).ok()?;
        Some([&id[..], &nonce, &ciphertext].concat())
    }

    pub(super) fn decrypt(&self, key: &str, encrypted: &[u8]) -> Result<Vec<u8>, DecryptError> {
        let (id, rest) = encrypted.split_first_chunk::<KEY_ID_BYTES>().ok_or(DecryptError::Damaged)?;
        let (nonce, ciphertext) = rest.split_first_chunk::<NONCE_LEN>().ok_or(DecryptError::Damaged)?;
        let (_, cipher) = self.keys.iter().find(|(key_id, _)| key_id == id).ok_or(DecryptError::UnknownKey)?;
        let mut plain = ciphertext.to_vec();
        let associated = Aad::from(key.as_bytes());
        let decrypted = cipher.open_in_place(Nonce::assume_unique_for_key(*nonce), associated, &mut plain);
        let length = decrypted.map_err(|_| DecryptError::Damaged)?.len();
        plain.truncate(length);
        Ok(plain)
    }

    /// Returns true if the value is encrypted with the first key.
    pub(super) fn is_current(&self, encrypted: &[u8]) -> bool {
        self.keys.first().is_some_and(|(id, _)| encrypted.starts_with(id))
    }
}

fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' | b'-' => Some(62),
        b'/' | b'_' => Some(63),
        _ => None,
    };
    let (mut out, mut bits, mut count) = (Vec::new(), 0u32, 0);
    for c in text.trim_end_matches('=').bytes() {
        bits = (bits << 6) | u32::from(value(c)?);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST_KEY: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
    const SECOND_KEY: &str = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";

    fn encryptor(text: &str) -> Result<Encryptor, KeyFileError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        fs::write(&path, text).unwrap();
        Encryptor::read(&path, &["/secret/"])
    }

    #[test]
    fn a_value_decrypts_only_with_its_key_and_under_its_storage_key() {
        let (one, two) = (encryptor(FIRST_KEY).unwrap(), encryptor(SECOND_KEY).unwrap());
        let encrypted = one.encrypt("/secret/a", b"value").unwrap();
        assert!(!encrypted.windows(5).any(|w| w == b"value"));
        assert_eq!(one.decrypt("/secret/a", &encrypted).unwrap(), b"value");
        assert_eq!(
            one.decrypt("/secret/b", &encrypted),
            Err(DecryptError::Damaged),
            "a value cannot be moved to another storage key"
        );
        assert_eq!(two.decrypt("/secret/a", &encrypted), Err(DecryptError::UnknownKey));
        let mut damaged = encrypted.clone();
        *damaged.last_mut().unwrap() ^= 1;
        assert_eq!(one.decrypt("/secret/a", &damaged), Err(DecryptError::Damaged));
        assert_ne!(one.encrypt("/secret/a", b"value").unwrap(), encrypted, "no nonce is used twice");
        let both = encryptor(&format!("# the new one\n{SECOND_KEY}\n\n{FIRST_KEY}\n")).unwrap();
        assert_eq!(both.decrypt("/secret/a", &encrypted).unwrap(), b"value");
        assert!(!both.is_current(&encrypted) && both.is_current(&both.encrypt("/secret/a", b"").unwrap()));
    }

    #[test]
    fn a_file_without_valid_keys_is_refused() {
        for text in ["", "# nothing\n"] {
            assert!(matches!(encryptor(text), Err(KeyFileError::Empty { .. })), "{text:?}");
        }
        for text in ["short", "AQEB", "not base64 !"] {
            assert!(matches!(encryptor(text), Err(KeyFileError::Malformed { line: 1, .. })), "{text:?}");
        }
    }
}
