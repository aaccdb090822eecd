//! Events as watchers read them, made once for all who watch. Only the latest are kept: a watcher that is behind makes
//! its own.

use bytes::Bytes;
use cleat_store::Revision;
use parking_lot::Mutex;

use crate::http::accept::Form;

const PLACES: usize = 128;
const FORMS: usize = 3;
/// Larger lines are not worth their memory.
const LARGEST: usize = 64 << 10;

/// A change as one kind of watcher sees it. Its revision alone tells which object of which kind it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) revision: Revision,
    pub(crate) name: &'static str,
    pub(crate) form: Form,
}

impl Line {
    /// Forms of one change stay out of each other's place.
    fn place(&self) -> usize {
        (self.revision as usize).wrapping_mul(FORMS).wrapping_add(self.form as usize) % PLACES
    }
}

pub(crate) struct Lines {
    places: Vec<Mutex<Option<(Line, Bytes)>>>,
}

impl Default for Lines {
    fn default() -> Self {
        Self { places: (0..PLACES).map(|_| Mutex::default()).collect() }
    }
}

impl Lines {
    pub(crate) fn get(&self, line: Line, make: impl FnOnce() -> Bytes) -> Bytes {
        // Watchers of one form come to the same line at about the same time: the first makes it, the others wait for it.
        let mut place = self.places[line.place()].lock();
        match &*place {
            Some((found, bytes)) if *found == line => bytes.clone(),
            _ => {
                let bytes = make();
                *place = Some((line, bytes.clone())).filter(|_| bytes.len() <= LARGEST);
                bytes
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_made_once_and_never_mistaken_for_another() {
        let lines = Lines::default();
        let line = Line { revision: 7, name: "ADDED", form: Form::Plain };
        let made = |line: Line, text: &'static str| {
            let mut fresh = false;
            let bytes = lines.get(line, || {
                fresh = true;
                Bytes::from_static(text.as_bytes())
            });
            (fresh, bytes)
        };
        assert_eq!(made(line, "a"), (true, "a".into()));
        assert_eq!(made(line, "b"), (false, "a".into()));
        for other in [
            Line { name: "MODIFIED", ..line },
            Line { form: Form::Partial, ..line },
            Line { revision: 7 + PLACES as u64, ..line },
        ] {
            assert_eq!(made(other, "c"), (true, "c".into()), "{other:?}");
        }
        assert_eq!(made(line, "d"), (true, "d".into()), "what was displaced is made again");
        let partial = Line { form: Form::Partial, ..line };
        assert_eq!(made(partial, "e"), (false, "c".into()), "one form does not displace another");
        let large = Bytes::from(vec![b'x'; LARGEST + 1]);
        let line = Line { revision: 8, ..line };
        assert_eq!(lines.get(line, || large.clone()), large);
        assert_eq!(made(line, "e"), (true, "e".into()), "what is large is not kept");
    }
}
