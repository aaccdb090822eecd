//! Caches encoded watch events, so that a change is encoded once for all clients that watch it in the same form. Only the
//! latest are cached: a watch that has fallen behind encodes its events itself.

use bytes::Bytes;
use cleat_store::Revision;
use parking_lot::Mutex;

const CACHE_SLOTS: usize = 128;
/// How many forms an object can be shown in.
const FORMS: usize = 3;
/// Longer frames are not cached.
const MAX_FRAME_BYTES: usize = 64 << 10;

/// One change in one form. The revision identifies the object and its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchFrameKey {
    pub revision: Revision,
    /// The type of the event: `ADDED`, `MODIFIED` or `DELETED`.
    pub event: &'static str,
    /// The number of the form, less than [`FORMS`].
    pub form: usize,
}

impl WatchFrameKey {
    /// Different forms of one change have different slots.
    fn slot(&self) -> usize {
        (self.revision as usize).wrapping_mul(FORMS).wrapping_add(self.form) % CACHE_SLOTS
    }
}

pub struct WatchFrameCache {
    slots: Vec<Mutex<Option<(WatchFrameKey, Bytes)>>>,
}

impl Default for WatchFrameCache {
    fn default() -> Self {
        Self { slots: (0..CACHE_SLOTS).map(|_| Mutex::default()).collect() }
    }
}

impl WatchFrameCache {
    /// Returns the cached frame, or encodes and caches it.
    pub fn get_or_encode(&self, key: WatchFrameKey, encode: impl FnOnce() -> Bytes) -> Bytes {
        // Watches of one form reach a change at about the same time: the first encodes it while the others wait.
        let mut slot = self.slots[key.slot()].lock();
        match &*slot {
            Some((cached, frame)) if *cached == key => frame.clone(),
            _ => {
                let frame = encode();
                *slot = Some((key, frame.clone())).filter(|_| frame.len() <= MAX_FRAME_BYTES);
                frame
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_encoded_once_and_never_mistaken_for_another() {
        let cache = WatchFrameCache::default();
        let key = WatchFrameKey { revision: 7, event: "ADDED", form: 0 };
        let get = |key: WatchFrameKey, text: &'static str| {
            let mut encoded = false;
            let frame = cache.get_or_encode(key, || {
                encoded = true;
                Bytes::from_static(text.as_bytes())
            });
            (encoded, frame)
        };
        assert_eq!(get(key, "a"), (true, "a".into()));
        assert_eq!(get(key, "b"), (false, "a".into()));
        for other in [
            WatchFrameKey { event: "MODIFIED", ..key },
            WatchFrameKey { form: 2, ..key },
            WatchFrameKey { revision: 7 + CACHE_SLOTS as u64, ..key },
        ] {
            assert_eq!(get(other, "c"), (true, "c".into()), "{other:?}");
        }
        assert_eq!(get(key, "d"), (true, "d".into()), "a replaced frame is encoded again");
        let partial = WatchFrameKey { form: 2, ..key };
        assert_eq!(get(partial, "e"), (false, "c".into()), "one form does not replace another");
        let large = Bytes::from(vec![b'x'; MAX_FRAME_BYTES + 1]);
        let key = WatchFrameKey { revision: 8, ..key };
        assert_eq!(cache.get_or_encode(key, || large.clone()), large);
        assert_eq!(get(key, "e"), (true, "e".into()), "a large frame is not cached");
    }
}
