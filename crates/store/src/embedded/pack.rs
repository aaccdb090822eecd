//! Which values are kept small by comparing them with which: those whose keys begin alike.

use std::collections::HashMap;
use std::sync::Arc;

use cleat_pack::{Compressor, Dictionary, Packed};

use super::seal::Seal;
use super::state::Change;
use crate::{Event, Kept};

/// A dictionary and the sort of keys it serves.
pub(super) type Named = (Arc<str>, Arc<Dictionary>);

#[derive(Default)]
pub(super) struct Packer {
    sorts: HashMap<Arc<str>, Compressor>,
    /// What is never a dictionary: one outlives the value it was taken from.
    private: Vec<String>,
    next: u32,
    /// Dictionaries that may not be on disk yet. What is packed with them must not get there before them; storing one twice
    /// does no harm.
    unsaved: Vec<Named>,
}

/// What keys of one kind of object begin with.
pub(super) fn sort(key: &str) -> &str {
    let mut slashes = key.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0);
    let (Some(first), second) = (slashes.next(), slashes.next()) else { return "" };
    let Some(second) = second else { return &key[..first] };
    // A group of kinds has a dot in its name, and its kinds below it.
    let third = slashes.next().filter(|_| key[first..second].contains('.'));
    &key[..third.unwrap_or(second)]
}

impl Packer {
    /// Goes on with the dictionaries that were stored; new ones are numbered from `next` on.
    pub(super) fn resumed(stored: &[Named], next: u32, private: &[&str]) -> Self {
        let private = private.iter().map(|prefix| (*prefix).to_owned()).collect();
        let mut packer = Self { private, next, ..Self::default() };
        let mut counts: HashMap<&Arc<str>, (u32, &Arc<Dictionary>)> = HashMap::new();
        for (sort, dictionary) in stored {
            let (count, newest) = counts.entry(sort).or_insert((0, dictionary));
            *count += 1;
            if dictionary.id() > newest.id() {
                *newest = dictionary;
            }
        }
        for (sort, (count, newest)) in counts {
            packer.sorts.insert(sort.clone(), Compressor::resumed(newest.clone(), count));
        }
        packer
    }

    /// The changes with their new values as they are kept. What is sealed on disk is compared with nothing: a dictionary is
    /// stored in the clear.
    pub(super) fn pack(&mut self, seal: Option<&Seal>, events: Vec<Event>) -> Vec<Change> {
        let mut changes = Vec::with_capacity(events.len());
        for event in events {
            let new = event.new.as_ref().map(|entry| {
                let sort = sort(&entry.key);
                let is_private = self.private.iter().any(|prefix| entry.key.starts_with(prefix.as_str()));
                let packed = match is_private || seal.is_some_and(|seal| seal.touches(sort)) {
                    true => Packed::plain(&entry.value),
                    false => self.packed(sort, &entry.value),
                };
                Kept::new(entry, packed)
            });
            changes.push(Change { event, new });
        }
        changes
    }

    fn packed(&mut self, name: &str, text: &[u8]) -> Packed {
        if !self.sorts.contains_key(name) {
            self.sorts.insert(name.into(), Compressor::default());
        }
        let Some(sort) = self.sorts.get_mut(name) else { return Packed::plain(text) };
        let id = self.next;
        let packed = sort.pack(text, || id);
        if let Some(dictionary) = sort.dictionary().filter(|dictionary| dictionary.id() == id) {
            self.next += 1;
            self.unsaved.push((name.into(), dictionary.clone()));
        }
        packed
    }

    pub(super) fn unsaved(&self) -> &[Named] {
        &self.unsaved
    }

    /// What was unsaved is on disk.
    pub(super) fn saved(&mut self) {
        self.unsaved.clear();
    }
}

#[cfg(test)]
mod tests {
    use crate::Entry;

    use super::*;

    fn written(n: u64) -> Vec<Event> {
        let words: Vec<String> = (0..60).map(|word| (word * 7919 % 997).to_string()).collect();
        let value = format!("{n} {}", words.join(" ")).into();
        let entry = Entry { key: format!("/registry/things/{n}").into(), value, created: n, modified: n };
        vec![Event { revision: n, new: Some(entry), old: None }]
    }

    fn pack(packer: &mut Packer, n: u64) -> Kept {
        packer.pack(None, written(n)).remove(0).new.unwrap()
    }

    #[test]
    fn a_sample_is_stored_until_it_surely_is() {
        let mut packer = Packer::default();
        let before =
            (1..).take_while(|n| pack(&mut packer, *n).value.dictionary().is_none() && packer.unsaved().is_empty());
        let n = before.last().unwrap() + 2;
        let packed = pack(&mut packer, n);
        let used = packed.value.dictionary().unwrap();
        assert!(packer.unsaved().iter().any(|(sort, dictionary)| &**sort == "/registry/things" && dictionary == used));
        // The batch failed: the next one has to bring the dictionary again.
        pack(&mut packer, n + 1);
        assert_eq!(packer.unsaved().len(), 1);
        packer.saved();
        pack(&mut packer, n + 2);
        assert!(packer.unsaved().is_empty());
        let stored = [("/registry/things".into(), used.clone())];
        let mut resumed = Packer::resumed(&stored, used.id() + 1, &[]);
        assert_eq!(pack(&mut resumed, n + 3).value.dictionary(), Some(used), "a start goes on with what is there");
    }

    #[test]
    fn what_is_private_is_no_sample() {
        let mut packer = Packer::resumed(&[], 0, &["/registry/things/"]);
        assert!((1..100).all(|n| pack(&mut packer, n).value.dictionary().is_none()));
        assert!(packer.unsaved().is_empty());
    }

    #[test]
    fn keys_that_begin_alike_are_of_one_sort() {
        for (key, of) in [
            ("/registry/pods/ns/name", "/registry/pods"),
            ("/registry/nodes/name", "/registry/nodes"),
            ("/registry/example.com/widgets/ns/name", "/registry/example.com/widgets"),
            ("/registry/example.com/name", "/registry/example.com"),
            ("/k/1", "/k"),
            ("/k", ""),
            ("k", ""),
        ] {
            assert_eq!(sort(key), of, "{key}");
        }
    }
}
