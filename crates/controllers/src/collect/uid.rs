//! The compact form of an object's uid. The graph stores one for each object of the cluster, and nearly all are UUIDs.

use std::fmt::{self, Debug, Display, Formatter};

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) enum Uid {
    Uuid([u8; 16]),
    /// Any other text: clients may write anything into an owner reference.
    Other(Box<str>),
}

const DASH_POSITIONS: [usize; 4] = [8, 13, 18, 23];
const UUID_CHARS: usize = 36;

impl Uid {
    pub(super) fn parse(text: &str) -> Self {
        parse_uuid(text.as_bytes()).map_or_else(|| Self::Other(text.into()), Self::Uuid)
    }
}

/// Parses only the form that `Display` prints: lower case with dashes. Other spellings must stay distinguishable.
fn parse_uuid(text: &[u8]) -> Option<[u8; 16]> {
    if text.len() != UUID_CHARS || DASH_POSITIONS.iter().any(|at| text[*at] != b'-') {
        return None;
    }
    let mut digits =
        text.iter().enumerate().filter(|(at, _)| !DASH_POSITIONS.contains(at)).map(|(_, digit)| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        });
    let mut bytes = [0; 16];
    for byte in &mut bytes {
        *byte = digits.next()?? << 4 | digits.next()??;
    }
    Some(bytes)
}

impl Display for Uid {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uuid(bytes) => {
                for (at, byte) in bytes.iter().enumerate() {
                    let dash = if [4, 6, 8, 10].contains(&at) { "-" } else { "" };
                    write!(f, "{dash}{byte:02x}")?;
                }
                Ok(())
            }
            Self::Other(text) => f.write_str(text),
        }
    }
}

impl Debug for Uid {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uid_is_displayed_as_it_was_written() {
        for (text, is_uuid) in [
            ("0f8fad5b-d9cb-469f-a165-70867728950e", true),
            ("00000000-0000-0000-0000-000000000000", true),
            ("0F8FAD5B-D9CB-469F-A165-70867728950E", false),
            ("0f8fad5bd9cb-469f-a165-70867728950e-", false),
            ("0f8fad5b-d9cb-469f-a165-70867728950g", false),
            ("uid-of-a-test", false),
            ("", false),
        ] {
            let uid = Uid::parse(text);
            assert_eq!(uid.to_string(), text);
            assert_eq!(matches!(uid, Uid::Uuid(_)), is_uuid, "{text}");
            assert_eq!(uid, Uid::parse(text));
        }
    }
}
