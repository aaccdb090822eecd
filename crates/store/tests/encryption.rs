//! Encryption at rest: what is on disk, which keys open a store, and how keys are replaced.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use bytes::Bytes;
use cleat_store::embedded::{Encryptor, HistoryLimits};
use cleat_store::{EmbeddedStore, OpenError, Store};

const FIRST_KEY: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
const SECOND_KEY: &str = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";
const PLAIN: &[u8] = b"the password is swordfish";

struct StoreDir(tempfile::TempDir);

impl StoreDir {
    fn path(&self) -> PathBuf {
        self.0.path().join("store.redb")
    }

    fn try_open(&self, keys: &[&str]) -> Result<EmbeddedStore, OpenError> {
        let encryptor = (!keys.is_empty()).then(|| {
            let file = self.0.path().join("keys");
            std::fs::write(&file, keys.join("\n")).unwrap();
            Encryptor::read(&file, &["/secrets/"]).unwrap()
        });
        EmbeddedStore::open_encrypted(&self.path(), HistoryLimits::default(), encryptor, &[])
    }

    fn open(&self, keys: &[&str]) -> EmbeddedStore {
        self.try_open(keys).unwrap()
    }
}

/// Returns true if any file in the directory of the store contains these bytes.
fn is_on_disk(path: &Path, wanted: &[u8]) -> bool {
    let files = std::fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    files.map(|file| std::fs::read(file).unwrap()).any(|bytes| bytes.windows(wanted.len()).any(|w| w == wanted))
}

async fn value(store: &EmbeddedStore, key: &str) -> Bytes {
    store.get(key).await.unwrap().unwrap().value
}

#[tokio::test]
async fn a_covered_value_is_never_plain_on_disk() {
    let dir = StoreDir(tempfile::tempdir().unwrap());
    let store = dir.open(&[FIRST_KEY]);
    let created = store.create("/secrets/a", PLAIN.into()).await.unwrap();
    store.create("/maps/a", Bytes::from_static(b"in the clear")).await.unwrap();
    assert_eq!(value(&store, "/secrets/a").await, PLAIN, "readers get it decrypted");
    assert!(!is_on_disk(&dir.path(), b"swordfish"), "not in the log");
    drop(store);
    assert!(!is_on_disk(&dir.path(), b"swordfish"));
    assert!(is_on_disk(&dir.path(), b"in the clear"), "the rest is not covered");
    let again = dir.open(&[FIRST_KEY]);
    let entry = again.get("/secrets/a").await.unwrap().unwrap();
    assert_eq!((&entry.value[..], entry.created, entry.modified), (PLAIN, created, created));
}

#[tokio::test]
async fn without_the_right_key_the_store_is_refused_and_not_modified() {
    let dir = StoreDir(tempfile::tempdir().unwrap());
    dir.open(&[FIRST_KEY]).create("/secrets/a", PLAIN.into()).await.unwrap();
    let error = dir.try_open(&[]).err().unwrap();
    assert!(matches!(&error, OpenError::Encrypted { key, .. } if key == "/secrets/a"), "{error}");
    let error = dir.try_open(&[SECOND_KEY]).err().unwrap();
    assert!(matches!(&error, OpenError::WrongKey { key, .. } if key == "/secrets/a"), "{error}");
    assert!(error.to_string().contains("encrypted with a key that was not given"), "{error}");
    assert_eq!(value(&dir.open(&[FIRST_KEY]), "/secrets/a").await, PLAIN);
}

#[tokio::test]
async fn a_start_encrypts_everything_with_the_first_key() {
    let dir = StoreDir(tempfile::tempdir().unwrap());
    dir.open(&[]).create("/secrets/a", PLAIN.into()).await.unwrap();
    drop(dir.open(&[FIRST_KEY]));
    assert!(dir.try_open(&[]).is_err(), "the plain value is encrypted now");
    assert!(!is_on_disk(&dir.path(), b"swordfish"), "and plain nowhere in the file");
    drop(dir.open(&[SECOND_KEY, FIRST_KEY]));
    assert!(dir.try_open(&[FIRST_KEY]).is_err(), "the old key decrypts nothing");
    assert_eq!(value(&dir.open(&[SECOND_KEY]), "/secrets/a").await, PLAIN);
}

/// Copies the files as they are now: the state after a power failure.
fn copy_of(dir: &StoreDir) -> StoreDir {
    let copy = StoreDir(tempfile::tempdir().unwrap());
    for entry in std::fs::read_dir(dir.0.path()).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), copy.0.path().join(entry.file_name())).unwrap();
    }
    copy
}

#[tokio::test]
async fn a_start_with_a_key_leaves_nothing_plain_in_the_log() {
    let dir = StoreDir(tempfile::tempdir().unwrap());
    let store = dir.open(&[]);
    store.create("/secrets/a", PLAIN.into()).await.unwrap();
    let revision = store.create("/maps/a", Bytes::from_static(b"in the clear")).await.unwrap();
    let copy = copy_of(&dir);
    assert!(is_on_disk(&copy.path(), b"swordfish"));
    let encrypted = copy.open(&[FIRST_KEY]);
    assert!(!is_on_disk(&copy.path(), b"swordfish"));
    assert_eq!((value(&encrypted, "/secrets/a").await, encrypted.revision().await.unwrap()), (PLAIN.into(), revision));
    encrypted.create("/secrets/b", PLAIN.into()).await.unwrap();
    let again = copy_of(&copy);
    assert!(again.try_open(&[]).is_err(), "values that only the log has are encrypted too");
    assert_eq!(value(&again.open(&[FIRST_KEY]), "/secrets/b").await, PLAIN);
}

/// The log still holds a value after it was deleted.
#[tokio::test]
async fn a_start_with_a_key_leaves_no_deleted_value_in_the_log() {
    let dir = StoreDir(tempfile::tempdir().unwrap());
    let store = dir.open(&[]);
    let created = store.create("/secrets/a", PLAIN.into()).await.unwrap();
    store.delete("/secrets/a", created).await.unwrap();
    let copy = copy_of(&dir);
    assert!(is_on_disk(&copy.path(), b"swordfish"));
    let encrypted = copy.open(&[FIRST_KEY]);
    assert!(!is_on_disk(&copy.path(), b"swordfish"));
    assert!(copy.0.path().join("store.redb").exists() && !copy.0.path().join("store.redb.log0").exists());
    let created = encrypted.create("/secrets/b", PLAIN.into()).await.unwrap();
    encrypted.delete("/secrets/b", created).await.unwrap();
    let again = copy_of(&copy);
    again.try_open(&[]).expect("no value is left that needs a key");
}

#[tokio::test]
async fn no_dictionary_of_encrypted_values_stays_on_disk() {
    let dir = StoreDir(tempfile::tempdir().unwrap());
    let secret = |n: usize| Bytes::from(format!("{n}: {} {}", "the password is swordfish", "word ".repeat(40)));
    let store = dir.open(&[]);
    for n in 0..50 {
        store.create(&format!("/secrets/{n}"), secret(n)).await.unwrap();
    }
    drop(store);
    assert!(is_on_disk(&dir.path(), b"swordfish"));
    let encrypted = dir.open(&[FIRST_KEY]);
    for n in 50..100 {
        encrypted.create(&format!("/secrets/{n}"), secret(n)).await.unwrap();
    }
    drop(encrypted);
    assert!(!is_on_disk(&dir.path(), b"swordfish"));
    let again = dir.open(&[FIRST_KEY]);
    for n in 0..100 {
        assert_eq!(value(&again, &format!("/secrets/{n}")).await, secret(n));
    }
}
