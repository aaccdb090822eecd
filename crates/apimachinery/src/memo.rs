//! What a pure function gave, kept for the next time it is asked the same. Bounded: whoever asks for what is not here
//! any more works it out again.

use std::collections::HashMap;

use parking_lot::RwLock;

/// How much one generation holds, keys and values together. There are two for each memo.
const GENERATION: usize = 64 << 10;
/// What is larger is not worth its place.
const ENTRY: usize = 8 << 10;

/// Answers by question. What has not been asked for while a whole generation of others came is forgotten.
pub struct Memo<V>(RwLock<Generations<V>>);

struct Generations<V> {
    recent: HashMap<Box<[u8]>, V>,
    former: HashMap<Box<[u8]>, V>,
    /// What the recent ones weigh.
    weight: usize,
}

impl<V> Default for Memo<V> {
    fn default() -> Self {
        Self(RwLock::new(Generations { recent: HashMap::new(), former: HashMap::new(), weight: 0 }))
    }
}

impl<V: Weighs + Clone> Memo<V> {
    pub fn find(&self, question: &[u8]) -> Option<V> {
        let known = self.0.read();
        if let Some(answer) = known.recent.get(question) {
            return Some(answer.clone());
        }
        let answer = known.former.get(question)?.clone();
        drop(known);
        self.keep(question, answer.clone());
        Some(answer)
    }

    pub fn keep(&self, question: &[u8], answer: V) {
        let weight = question.len() + answer.weight();
        if weight > ENTRY {
            return;
        }
        let mut known = self.0.write();
        if known.weight + weight > GENERATION {
            known.former = std::mem::take(&mut known.recent);
            known.weight = 0;
        }
        if known.recent.insert(question.into(), answer).is_none() {
            known.weight += weight;
        }
    }
}

/// How much memory an answer takes, in bytes.
pub trait Weighs {
    fn weight(&self) -> usize;
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Weighs for usize {
        fn weight(&self) -> usize {
            *self
        }
    }

    #[test]
    fn what_is_asked_for_stays_and_the_rest_goes() {
        let memo = Memo::default();
        memo.keep(b"used", 10);
        memo.keep(b"unused", 10);
        for i in 0..10_000_usize {
            memo.keep(&i.to_be_bytes(), 1000);
            assert_eq!(memo.find(b"used"), Some(10), "asked for after {i}");
        }
        assert_eq!(memo.find(b"unused"), None);
        let known = memo.0.read();
        for generation in [&known.recent, &known.former] {
            let weight: usize = generation.iter().map(|(question, answer)| question.len() + answer.weight()).sum();
            assert!(weight <= GENERATION, "{weight}");
        }
    }

    #[test]
    fn the_large_is_not_kept() {
        let memo = Memo::default();
        memo.keep(b"large", ENTRY);
        assert_eq!(memo.find(b"large"), None);
        memo.keep(&vec![0; ENTRY], 1);
        assert_eq!(memo.find(&vec![0; ENTRY]), None);
    }
}
