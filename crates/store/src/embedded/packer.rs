//! Compresses values and assigns their dictionaries. Values whose keys share a prefix form a group and share a
//! dictionary.

use std::collections::HashMap;
use std::sync::Arc;

use cleat_pack::{Compressor, Dictionary, Packed};

use super::encryption::Encryptor;
use super::state::Change;
use crate::entry::{Event, StoredEntry};

/// A dictionary and the group of keys that it serves.
#[derive(Clone)]
pub(super) struct GroupDictionary {
    pub(super) group: Arc<str>,
    pub(super) dictionary: Arc<Dictionary>,
}

#[derive(Default)]
pub(super) struct Packer {
    /// One compressor per group.
    compressors: HashMap<Arc<str>, Compressor>,
    /// Values under these key prefixes are not compressed: a dictionary outlives the value whose bytes it contains.
    private_prefixes: Vec<String>,
    next_id: u32,
    /// Dictionaries that may not be on disk yet. They must be durable before or together with the first value that is
    /// compressed with them. Storing one twice does no harm.
    unsaved: Vec<GroupDictionary>,
}

/// The group of a key: the prefix that the keys of one kind of object have in common.
pub(super) fn group_of(key: &str) -> &str {
    let mut slashes = key.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0);
    let (Some(first), second) = (slashes.next(), slashes.next()) else { return "" };
    let Some(second) = second else { return &key[..first] };
    // The name of an API group contains a dot; the name of the kind follows it.
    let third = slashes.next().filter(|_| key[first..second].contains('.'));
    &key[..third.unwrap_or(second)]
}

impl Packer {
    /// Continues with the dictionaries that were stored. New ones get ids from `next_id` on.
    pub(super) fn resume(stored: &[GroupDictionary], next_id: u32, private_prefixes: &[&str]) -> Self {
        let private_prefixes = private_prefixes.iter().map(|prefix| (*prefix).to_owned()).collect();
        let mut packer = Self { private_prefixes, next_id, ..Self::default() };
        let mut newest_by_group: HashMap<&Arc<str>, (u32, &Arc<Dictionary>)> = HashMap::new();
        for GroupDictionary { group, dictionary } in stored {
            let (count, newest) = newest_by_group.entry(group).or_insert((0, dictionary));
            *count += 1;
            if dictionary.id() > newest.id() {
                *newest = dictionary;
            }
        }
        for (group, (count, newest)) in newest_by_group {
            packer.compressors.insert(group.clone(), Compressor::with_dictionary(newest.clone(), count));
        }
        packer
    }

    /// Adds to each event its new value, compressed. Values of a group that is encrypted on disk, even in part, stay
    /// plain: dictionaries are stored without encryption.
    pub(super) fn pack(&mut self, encryptor: Option<&Encryptor>, events: Vec<Event>) -> Vec<Change> {
        let mut changes = Vec::with_capacity(events.len());
        for event in events {
            let new = event.new.as_ref().map(|entry| {
                let group = group_of(&entry.key);
                let is_private = self.private_prefixes.iter().any(|prefix| entry.key.starts_with(prefix.as_str()));
                let packed = match is_private || encryptor.is_some_and(|encryptor| encryptor.covers_some_of(group)) {
                    true => Packed::plain(&entry.value),
                    false => self.pack_value(group, &entry.value),
                };
                StoredEntry::new(entry, packed)
            });
            changes.push(Change { event, new });
        }
        changes
    }

    fn pack_value(&mut self, group: &str, value: &[u8]) -> Packed {
        if !self.compressors.contains_key(group) {
            self.compressors.insert(group.into(), Compressor::default());
        }
        let Some(compressor) = self.compressors.get_mut(group) else { return Packed::plain(value) };
        let id = self.next_id;
        let packed = compressor.pack(value, || id);
        if let Some(dictionary) = compressor.dictionary().filter(|dictionary| dictionary.id() == id) {
            self.next_id += 1;
            self.unsaved.push(GroupDictionary { group: group.into(), dictionary: dictionary.clone() });
        }
        packed
    }

    pub(super) fn unsaved(&self) -> &[GroupDictionary] {
        &self.unsaved
    }

    /// The unsaved dictionaries are durable now.
    pub(super) fn mark_saved(&mut self) {
        self.unsaved.clear();
    }
}

#[cfg(test)]
mod tests {
    use crate::entry::Entry;

    use super::*;

    fn creation(n: u64) -> Vec<Event> {
        let words: Vec<String> = (0..60).map(|word| (word * 7919 % 997).to_string()).collect();
        let value = format!("{n} {}", words.join(" ")).into();
        let entry = Entry { key: format!("/registry/things/{n}").into(), value, created: n, modified: n };
        vec![Event { revision: n, new: Some(entry), old: None }]
    }

    fn pack(packer: &mut Packer, n: u64) -> StoredEntry {
        packer.pack(None, creation(n)).remove(0).new.unwrap()
    }

    #[test]
    fn a_dictionary_stays_unsaved_until_a_batch_has_stored_it() {
        let mut packer = Packer::default();
        let before =
            (1..).take_while(|n| pack(&mut packer, *n).value.dictionary().is_none() && packer.unsaved().is_empty());
        let n = before.last().unwrap() + 2;
        let packed = pack(&mut packer, n);
        let used = packed.value.dictionary().unwrap();
        assert!(
            packer
                .unsaved()
                .iter()
                .any(|unsaved| { &*unsaved.group == "/registry/things" && &unsaved.dictionary == used })
        );
        // The batch failed: the next one has to store the dictionary again.
        pack(&mut packer, n + 1);
        assert_eq!(packer.unsaved().len(), 1);
        packer.mark_saved();
        pack(&mut packer, n + 2);
        assert!(packer.unsaved().is_empty());
        let stored = [GroupDictionary { group: "/registry/things".into(), dictionary: used.clone() }];
        let mut resumed = Packer::resume(&stored, used.id() + 1, &[]);
        assert_eq!(pack(&mut resumed, n + 3).value.dictionary(), Some(used), "a restart continues with it");
    }

    #[test]
    fn a_private_value_never_becomes_a_dictionary() {
        let mut packer = Packer::resume(&[], 0, &["/registry/things/"]);
        assert!((1..100).all(|n| pack(&mut packer, n).value.dictionary().is_none()));
        assert!(packer.unsaved().is_empty());
    }

    #[test]
    fn keys_of_one_kind_form_a_group() {
        for (key, group) in [
            ("/registry/pods/ns/name", "/registry/pods"),
            ("/registry/nodes/name", "/registry/nodes"),
            ("/registry/example.com/widgets/ns/name", "/registry/example.com/widgets"),
            ("/registry/example.com/name", "/registry/example.com"),
            ("/k/1", "/k"),
            ("/k", ""),
            ("k", ""),
        ] {
            assert_eq!(group_of(key), group, "{key}");
        }
    }
}
