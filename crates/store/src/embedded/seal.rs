//! Encryption at rest: values under chosen key prefixes are sealed with AES-256-GCM before they reach the file. Memory,
//! watches and readers see plain bytes.
//!
//! The first key seals; all of them open. When a store is opened, what is not sealed with the first key is sealed anew,
//! so a key is replaced by putting the new one first, starting once, and removing the old one.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};

const KEY: usize = 32;
/// The first bytes of a digest of the key: tells a wrong key from a damaged value.
const ID: usize = 8;

#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error("cannot read the encryption keys in {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{path} has no key: it needs a line with 32 random bytes in base64, for example of `head -c32 /dev/urandom | base64`"
    )]
    Empty { path: PathBuf },
    #[error("line {line} of {path} is no key: it must be 32 bytes in base64")]
    Malformed { path: PathBuf, line: usize },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum UnsealError {
    #[error("it is encrypted with a key that was not given")]
    UnknownKey,
    #[error("it does not decrypt: the value is damaged")]
    Damaged,
}

pub struct Seal {
    keys: Vec<([u8; ID], LessSafeKey)>,
    prefixes: Vec<String>,
    random: SystemRandom,
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seal").field("prefixes", &self.prefixes).finish_non_exhaustive()
    }
}

impl Seal {
    /// The keys in a file, one per line in base64, the one to seal with first. Empty lines and lines that begin with
    /// `#` are skipped.
    pub fn read(path: &Path, prefixes: &[&str]) -> Result<Self, KeyFileError> {
        let text = fs::read_to_string(path).map_err(|source| KeyFileError::Read { path: path.into(), source })?;
        let mut keys = Vec::new();
        for (i, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let malformed = || KeyFileError::Malformed { path: path.into(), line: i + 1 };
            let bytes = base64(line).filter(|b| b.len() == KEY).ok_or_else(malformed)?;
            let key = UnboundKey::new(&AES_256_GCM, &bytes).map_err(|_| malformed())?;
            let mut id = [0; ID];
            id.copy_from_slice(&digest(&SHA256, &bytes).as_ref()[..ID]);
            keys.push((id, LessSafeKey::new(key)));
        }
        if keys.is_empty() {
            return Err(KeyFileError::Empty { path: path.into() });
        }
        let prefixes = prefixes.iter().map(|p| (*p).to_owned()).collect();
        Ok(Self { keys, prefixes, random: SystemRandom::new() })
    }

    /// Are values under this key to be sealed?
    pub(super) fn covers(&self, key: &str) -> bool {
        self.prefixes.iter().any(|prefix| key.starts_with(prefix))
    }

    /// Are values of some keys of this sort to be sealed?
    pub(super) fn touches(&self, sort: &str) -> bool {
        let directory = format!("{sort}/");
        self.prefixes.iter().any(|prefix| prefix.starts_with(&directory) || directory.starts_with(prefix))
    }

    /// The sealed form: key id, nonce, ciphertext. It opens only under the same storage key.
    pub(super) fn seal(&self, key: &str, value: &[u8]) -> Option<Vec<u8>> {
        let (id, cipher) = self.keys.first()?;
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).ok()?;
        let mut sealed = value.to_vec();
        let associated = Aad::from(key.as_bytes());
        cipher.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), associated, &mut sealed).ok()?;
        Some([&id[..], &nonce, &sealed].concat())
    }

    pub(super) fn open(&self, key: &str, sealed: &[u8]) -> Result<Vec<u8>, UnsealError> {
        let (id, rest) = sealed.split_first_chunk::<ID>().ok_or(UnsealError::Damaged)?;
        let (nonce, ciphertext) = rest.split_first_chunk::<NONCE_LEN>().ok_or(UnsealError::Damaged)?;
        let (_, cipher) = self.keys.iter().find(|(known, _)| known == id).ok_or(UnsealError::UnknownKey)?;
        let mut plain = ciphertext.to_vec();
        let associated = Aad::from(key.as_bytes());
        let opened = cipher.open_in_place(Nonce::assume_unique_for_key(*nonce), associated, &mut plain);
        let length = opened.map_err(|_| UnsealError::Damaged)?.len();
        plain.truncate(length);
        Ok(plain)
    }

    /// Is this sealed with the key that seals now?
    pub(super) fn is_current(&self, sealed: &[u8]) -> bool {
        self.keys.first().is_some_and(|(id, _)| sealed.starts_with(id))
    }
}

fn base64(text: &str) -> Option<Vec<u8>> {
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

    const ONE: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
    const TWO: &str = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";

    fn keys(text: &str) -> Result<Seal, KeyFileError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        fs::write(&path, text).unwrap();
        Seal::read(&path, &["/secret/"])
    }

    #[test]
    fn what_was_sealed_opens_with_its_key_in_its_place_only() {
        let (one, two) = (keys(ONE).unwrap(), keys(TWO).unwrap());
        let sealed = one.seal("/secret/a", b"value").unwrap();
        assert!(!sealed.windows(5).any(|w| w == b"value"));
        assert_eq!(one.open("/secret/a", &sealed).unwrap(), b"value");
        assert_eq!(one.open("/secret/b", &sealed), Err(UnsealError::Damaged), "a value cannot be moved");
        assert_eq!(two.open("/secret/a", &sealed), Err(UnsealError::UnknownKey));
        let mut damaged = sealed.clone();
        *damaged.last_mut().unwrap() ^= 1;
        assert_eq!(one.open("/secret/a", &damaged), Err(UnsealError::Damaged));
        assert_ne!(one.seal("/secret/a", b"value").unwrap(), sealed, "no nonce is used twice");
        let both = keys(&format!("# the new one\n{TWO}\n\n{ONE}\n")).unwrap();
        assert_eq!(both.open("/secret/a", &sealed).unwrap(), b"value");
        assert!(!both.is_current(&sealed) && both.is_current(&both.seal("/secret/a", b"").unwrap()));
    }

    #[test]
    fn a_file_without_keys_is_refused() {
        for text in ["", "# nothing\n"] {
            assert!(matches!(keys(text), Err(KeyFileError::Empty { .. })), "{text:?}");
        }
        for text in ["short", "AQEB", "not base64 !"] {
            assert!(matches!(keys(text), Err(KeyFileError::Malformed { line: 1, .. })), "{text:?}");
        }
    }
}
