//! Encryption at rest: what reaches the file, who can open it, and how keys are replaced.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use bytes::Bytes;
use cleat_store::embedded::{History, Seal};
use cleat_store::{EmbeddedStore, OpenError, Store};

const ONE: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
const TWO: &str = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";
const PLAIN: &[u8] = b"the password is swordfish";

struct Place(tempfile::TempDir);

impl Place {
    fn path(&self) -> PathBuf {
        self.0.path().join("store.redb")
    }

    fn try_open(&self, keys: &[&str]) -> Result<EmbeddedStore, OpenError> {
        let seal = (!keys.is_empty()).then(|| {
            let file = self.0.path().join("keys");
            std::fs::write(&file, keys.join("\n")).unwrap();
            Seal::read(&file, &["/secrets/"]).unwrap()
        });
        EmbeddedStore::open_sealed(&self.path(), History::default(), seal, &[])
    }

    fn open(&self, keys: &[&str]) -> EmbeddedStore {
        self.try_open(keys).unwrap()
    }
}

/// Is it anywhere in the directory of the store?
fn contains(path: &Path, wanted: &[u8]) -> bool {
    let files = std::fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    files.map(|file| std::fs::read(file).unwrap()).any(|bytes| bytes.windows(wanted.len()).any(|w| w == wanted))
}

async fn value(store: &EmbeddedStore, key: &str) -> Bytes {
    store.get(key).await.unwrap().unwrap().value
}

#[tokio::test]
async fn what_is_covered_never_reaches_the_file_in_the_clear() {
    let place = Place(tempfile::tempdir().unwrap());
    let store = place.open(&[ONE]);
    let created = store.create("/secrets/a", PLAIN.into()).await.unwrap();
    store.create("/maps/a", Bytes::from_static(b"in the clear")).await.unwrap();
    assert_eq!(value(&store, "/secrets/a").await, PLAIN, "readers see it plain");
    assert!(!contains(&place.path(), b"swordfish"), "nor in the log");
    drop(store);
    assert!(!contains(&place.path(), b"swordfish"));
    assert!(contains(&place.path(), b"in the clear"), "the rest is not covered");
    let again = place.open(&[ONE]);
    let entry = again.get("/secrets/a").await.unwrap().unwrap();
    assert_eq!((&entry.value[..], entry.created, entry.modified), (PLAIN, created, created));
}

#[tokio::test]
async fn without_the_right_key_the_store_does_not_open_and_is_left_alone() {
    let place = Place(tempfile::tempdir().unwrap());
    place.open(&[ONE]).create("/secrets/a", PLAIN.into()).await.unwrap();
    let error = place.try_open(&[]).err().unwrap();
    assert!(matches!(&error, OpenError::Encrypted { key, .. } if key == "/secrets/a"), "{error}");
    let error = place.try_open(&[TWO]).err().unwrap();
    assert!(matches!(&error, OpenError::WrongKey { key, .. } if key == "/secrets/a"), "{error}");
    assert!(error.to_string().contains("encrypted with a key that was not given"), "{error}");
    assert_eq!(value(&place.open(&[ONE]), "/secrets/a").await, PLAIN);
}

#[tokio::test]
async fn a_start_moves_everything_to_the_first_key() {
    let place = Place(tempfile::tempdir().unwrap());
    place.open(&[]).create("/secrets/a", PLAIN.into()).await.unwrap();
    drop(place.open(&[ONE]));
    assert!(place.try_open(&[]).is_err(), "what was in the clear is sealed now");
    assert!(!contains(&place.path(), b"swordfish"), "and nowhere else in the file");
    drop(place.open(&[TWO, ONE]));
    assert!(place.try_open(&[ONE]).is_err(), "the old key opens nothing any more");
    assert_eq!(value(&place.open(&[TWO]), "/secrets/a").await, PLAIN);
}

/// The same store as a machine finds it that lost its power.
fn copied(place: &Place) -> Place {
    let copy = Place(tempfile::tempdir().unwrap());
    for entry in std::fs::read_dir(place.0.path()).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), copy.0.path().join(entry.file_name())).unwrap();
    }
    copy
}

#[tokio::test]
async fn a_start_with_a_key_leaves_nothing_in_the_log() {
    let place = Place(tempfile::tempdir().unwrap());
    let store = place.open(&[]);
    store.create("/secrets/a", PLAIN.into()).await.unwrap();
    let revision = store.create("/maps/a", Bytes::from_static(b"in the clear")).await.unwrap();
    let copy = copied(&place);
    assert!(contains(&copy.path(), b"swordfish"));
    let sealed = copy.open(&[ONE]);
    assert!(!contains(&copy.path(), b"swordfish"));
    assert_eq!((value(&sealed, "/secrets/a").await, sealed.revision().await.unwrap()), (PLAIN.into(), revision));
    sealed.create("/secrets/b", PLAIN.into()).await.unwrap();
    let again = copied(&copy);
    assert!(again.try_open(&[]).is_err(), "what only the log has is sealed too");
    assert_eq!(value(&again.open(&[ONE]), "/secrets/b").await, PLAIN);
}

/// What is deleted is in the log all the same.
#[tokio::test]
async fn neither_does_it_leave_what_was_deleted_before() {
    let place = Place(tempfile::tempdir().unwrap());
    let store = place.open(&[]);
    let made = store.create("/secrets/a", PLAIN.into()).await.unwrap();
    store.delete("/secrets/a", made).await.unwrap();
    let copy = copied(&place);
    assert!(contains(&copy.path(), b"swordfish"));
    let sealed = copy.open(&[ONE]);
    assert!(!contains(&copy.path(), b"swordfish"));
    assert!(copy.0.path().join("store.redb").exists() && !copy.0.path().join("store.redb.log0").exists());
    let made = sealed.create("/secrets/b", PLAIN.into()).await.unwrap();
    sealed.delete("/secrets/b", made).await.unwrap();
    let again = copied(&copy);
    again.try_open(&[]).expect("nothing is left that would need a key");
}

#[tokio::test]
async fn no_sample_of_what_is_sealed_stays_in_the_clear() {
    let place = Place(tempfile::tempdir().unwrap());
    let secret = |n: usize| Bytes::from(format!("{n}: {} {}", "the password is swordfish", "word ".repeat(40)));
    let store = place.open(&[]);
    for n in 0..50 {
        store.create(&format!("/secrets/{n}"), secret(n)).await.unwrap();
    }
    drop(store);
    assert!(contains(&place.path(), b"swordfish"));
    let sealed = place.open(&[ONE]);
    for n in 50..100 {
        sealed.create(&format!("/secrets/{n}"), secret(n)).await.unwrap();
    }
    drop(sealed);
    assert!(!contains(&place.path(), b"swordfish"));
    let again = place.open(&[ONE]);
    for n in 0..100 {
        assert_eq!(value(&again, &format!("/secrets/{n}")).await, secret(n));
    }
}
