//! Decodes HPACK's Huffman code. The code is canonical: the lengths of the codes determine the codes.

/// The length in bits of each byte's code (RFC 7541, appendix B).
#[rustfmt::skip]
const CODE_BITS: [u8; 256] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
];

/// The length of the longest code.
const MAX_CODE_BITS: u8 = 30;

/// Returns `None` if `coded` is not a valid string.
pub(crate) fn decode(coded: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(coded.len() * 2);
    let (mut code, mut length) = (0u32, 0u8);
    for bit in coded.iter().flat_map(|byte| (0..8).rev().map(move |at| u32::from(byte >> at & 1))) {
        code = code << 1 | bit;
        length += 1;
        if let Some(symbol) = symbol(code, length) {
            decoded.push(symbol);
            (code, length) = (0, 0);
        } else if length > MAX_CODE_BITS {
            return None;
        }
    }
    // The padding is a prefix of the end-of-string code: at most seven ones.
    (length < 8 && code == (1 << length) - 1).then_some(decoded)
}

/// The codes of one length are consecutive, in the order of their symbols, and follow the codes of the next shorter length.
fn symbol(code: u32, length: u8) -> Option<u8> {
    let mut first = 0u32;
    for shorter in 1..length {
        let count = CODE_BITS.iter().filter(|bits| **bits == shorter).count() as u32;
        first = (first + count) << 1;
    }
    let index = code.checked_sub(first)? as usize;
    let mut of_length = (0..=255u8).filter(|symbol| CODE_BITS[usize::from(*symbol)] == length);
    of_length.nth(index)
}

#[cfg(test)]
pub(crate) fn encode(text: &[u8]) -> Vec<u8> {
    let mut bits = Vec::new();
    for byte in text {
        let length = CODE_BITS[usize::from(*byte)];
        let code = (0u32..1 << length).find(|code| symbol(*code, length) == Some(*byte)).unwrap();
        bits.extend((0..length).rev().map(|at| code >> at & 1));
    }
    bits.resize(bits.len().next_multiple_of(8), 1);
    bits.chunks(8).map(|byte| byte.iter().fold(0, |byte, bit| byte << 1 | *bit as u8)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_the_examples_of_the_specification() {
        for (coded, text) in [
            (&[0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff][..], "www.example.com"),
            (&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf], "no-cache"),
            (&[0x25, 0xa8, 0x49, 0xe9, 0x5b, 0xb8, 0xe8, 0xb4, 0xbf], "custom-value"),
            (&[], ""),
        ] {
            assert_eq!(decode(coded).unwrap(), text.as_bytes());
        }
        assert_eq!(decode(&encode(b"/var/lib/kubelet/%2Fcsi.sock~")).unwrap(), b"/var/lib/kubelet/%2Fcsi.sock~");
        assert_eq!(decode(&[0xff; 8]), None, "an end of string inside a string");
        assert_eq!(decode(&[0b0000_0000]), None, "padding of zeroes");
    }
}
