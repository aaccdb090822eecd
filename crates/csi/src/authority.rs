//! Accepts clients that send the path of the socket as `:authority`.
//!
//! gRPC libraries send it in plain form (older grpc-go without the scheme `unix:`, grpc-java) or percent-encoded
//! (grpc-core after 1.57). Neither is a valid authority, and `h2` resets such a stream with PROTOCOL_ERROR before tonic
//! sees the request. Upstream references:
//!
//! - hyperium/tonic#243 (now grpc/grpc-rust#243): asks to relax the check of the authority for clients of CSI drivers.
//! - hyperium/h2#442 and the unmerged pull request hyperium/h2#487: HTTP/2 over Unix domain sockets without a valid
//!   authority.
//! - grpc/grpc-go#2628: grpc-go sent no valid authority; its fix grpc/grpc-go#3730 sends `localhost` for `unix:` targets.
//! - kubernetes/kubernetes#112597: the kubelet sends `localhost` for Unix sockets; earlier releases sent the path.
//! - grpc/grpc-java#12664: grpc-java sends the plain socket path.
//! - grpc/grpc#38142: the percent-encoded socket path is not a valid authority.
//!
//! Once `h2` accepts such requests, this module and `huffman.rs` can be removed.
//!
//! The work-around replaces the invalid authority in the incoming header block by a valid one of the same length. The
//! length must not change: both ends then compute the same size of HPACK's dynamic table, and later references to the
//! entry get the replacement. All other bytes pass unchanged. A header block in several frames passes unchanged too; no
//! such client sends one.
use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

use crate::huffman;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER_BYTES: usize = 9;
const HEADERS: u8 = 1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// A longer HEADERS frame passes unchanged, so that it need not be buffered. No client of a driver sends so many headers.
const MAX_HEADER_BLOCK_BYTES: usize = 64 * 1024;
/// The index of `:authority` in HPACK's static table.
const AUTHORITY_INDEX: u64 = 1;

/// A server connection that replaces invalid authorities in what it reads.
pub(crate) struct AuthorityFixStream<S> {
    inner: S,
    rewriter: FrameRewriter,
    /// Bytes for the reader, already rewritten.
    rewritten: Vec<u8>,
    /// The position in `rewritten` up to which the reader has read.
    read_offset: usize,
    /// The inner stream has ended.
    ended: bool,
}

impl<S> AuthorityFixStream<S> {
    pub(crate) fn new(inner: S) -> AuthorityFixStream<S> {
        AuthorityFixStream {
            inner,
            rewriter: FrameRewriter::default(),
            rewritten: Vec::new(),
            read_offset: 0,
            ended: false,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorityFixStream<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if this.read_offset < this.rewritten.len() {
                let length = out.remaining().min(this.rewritten.len() - this.read_offset);
                out.put_slice(&this.rewritten[this.read_offset..this.read_offset + length]);
                this.read_offset += length;
                return Poll::Ready(Ok(()));
            }
            if this.ended {
                return Poll::Ready(Ok(()));
            }
            this.rewritten.clear();
            this.read_offset = 0;
            let mut bytes = [0; 8192];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.inner).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                this.ended = true;
                this.rewritten.append(&mut this.rewriter.incomplete);
            } else {
                this.rewriter.rewrite(read.filled(), &mut this.rewritten);
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AuthorityFixStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

impl<S: Connected> Connected for AuthorityFixStream<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> S::ConnectInfo {
        self.inner.connect_info()
    }
}

#[derive(Default)]
struct FrameRewriter {
    position: ParsePosition,
    /// The beginning of a frame whose rest has not arrived yet.
    incomplete: Vec<u8>,
}

#[derive(Default)]
enum ParsePosition {
    #[default]
    Preface,
    /// At the header of a frame.
    FrameStart,
    /// Inside a frame that passes unchanged, with this many bytes left.
    InPayload(usize),
    /// The connection is not HTTP/2: everything passes unchanged.
    NotHttp2,
}

impl FrameRewriter {
    fn rewrite(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let mut incomplete = std::mem::take(&mut self.incomplete);
        incomplete.extend_from_slice(bytes);
        let mut at = 0;
        while let Some(length) = self.step(&incomplete[at..], out) {
            at += length;
        }
        incomplete.drain(..at);
        self.incomplete = incomplete;
    }

    /// Processes the next element at the start of `bytes` and returns its length; `None` if it is incomplete.
    fn step(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Option<usize> {
        let length = match self.position {
            _ if bytes.is_empty() => return None,
            ParsePosition::Preface if PREFACE.starts_with(&bytes[..bytes.len().min(PREFACE.len())]) => {
                if bytes.len() < PREFACE.len() {
                    return None;
                }
                self.position = ParsePosition::FrameStart;
                PREFACE.len()
            }
            ParsePosition::Preface | ParsePosition::NotHttp2 => {
                self.position = ParsePosition::NotHttp2;
                bytes.len()
            }
            ParsePosition::InPayload(left) => {
                let length = left.min(bytes.len());
                self.position =
                    if length == left { ParsePosition::FrameStart } else { ParsePosition::InPayload(left - length) };
                length
            }
            ParsePosition::FrameStart => {
                let header = bytes.get(..FRAME_HEADER_BYTES)?;
                let length = usize::from(header[0]) << 16 | usize::from(header[1]) << 8 | usize::from(header[2]);
                let (kind, flags) = (header[3], header[4]);
                if kind == HEADERS && flags & END_HEADERS != 0 && length <= MAX_HEADER_BLOCK_BYTES {
                    let payload = bytes.get(FRAME_HEADER_BYTES..FRAME_HEADER_BYTES + length)?;
                    if let Some(new) = rewrite_headers(payload, flags) {
                        out.extend_from_slice(&(new.len() as u32).to_be_bytes()[1..]);
                        out.extend_from_slice(&[kind, flags & !PADDED]);
                        out.extend_from_slice(&header[5..]);
                        out.extend_from_slice(&new);
                        return Some(FRAME_HEADER_BYTES + length);
                    }
                    FRAME_HEADER_BYTES + length
                } else {
                    self.position =
                        if length == 0 { ParsePosition::FrameStart } else { ParsePosition::InPayload(length) };
                    FRAME_HEADER_BYTES
                }
            }
        };
        out.extend_from_slice(&bytes[..length]);
        Some(length)
    }
}

/// Returns the payload of a HEADERS frame with another authority and without padding; `None` if it need not change.
fn rewrite_headers(payload: &[u8], flags: u8) -> Option<Vec<u8>> {
    let mut block = payload;
    if flags & PADDED != 0 {
        let (padding, rest) = block.split_first()?;
        block = rest.get(..rest.len().checked_sub(usize::from(*padding))?)?;
    }
    let (priority, block) = block.split_at_checked(if flags & PRIORITY != 0 { 5 } else { 0 })?;
    let changed = replace_authority(block)?;
    Some([priority, &changed].concat())
}

/// Returns the header block with another authority; `None` if the authority is valid or the block cannot be parsed.
fn replace_authority(block: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let (mut at, mut copied_to) = (0, 0);
    while let Some(first) = block.get(at) {
        let index = match first {
            0x80.. => {
                at = integer(block, at, 7)?.1;
                continue;
            }
            0x20..0x40 => {
                at = integer(block, at, 5)?.1;
                continue;
            }
            0x40.. => integer(block, at, 6)?,
            _ => integer(block, at, 4)?,
        };
        at = index.1;
        let mut is_authority = index.0 == AUTHORITY_INDEX;
        if index.0 == 0 {
            let (name, end) = string(block, at)?;
            is_authority = name.decode()? == b":authority";
            at = end;
        }
        let (value, end) = string(block, at)?;
        if is_authority {
            let authority = value.decode()?;
            if !authority.is_empty() && http::uri::Authority::try_from(authority.as_slice()).is_err() {
                out.extend_from_slice(&block[copied_to..at]);
                write_length(authority.len(), &mut out);
                out.resize(out.len() + authority.len(), b'x');
                copied_to = end;
            }
        }
        at = end;
    }
    if copied_to == 0 {
        return None;
    }
    out.extend_from_slice(&block[copied_to..]);
    Some(out)
}

struct HpackString<'a> {
    huffman: bool,
    bytes: &'a [u8],
}

impl HpackString<'_> {
    fn decode(&self) -> Option<Vec<u8>> {
        if self.huffman { huffman::decode(self.bytes) } else { Some(self.bytes.to_vec()) }
    }
}

/// Returns the string at `at`, and the position of its end.
fn string(block: &[u8], at: usize) -> Option<(HpackString<'_>, usize)> {
    let huffman = block.get(at)? & 0x80 != 0;
    let (length, start) = integer(block, at, 7)?;
    let end = start.checked_add(usize::try_from(length).ok()?)?;
    Some((HpackString { huffman, bytes: block.get(start..end)? }, end))
}

/// Returns the integer that begins in the low `bits` bits at `at` (RFC 7541, section 5.1), and the position of its end.
fn integer(block: &[u8], at: usize, bits: u32) -> Option<(u64, usize)> {
    let max_prefix = (1u64 << bits) - 1;
    let mut value = u64::from(*block.get(at)?) & max_prefix;
    if value < max_prefix {
        return Some((value, at + 1));
    }
    for (step, byte) in block.get(at + 1..)?.iter().enumerate().take(5) {
        value += u64::from(byte & 0x7f) << (7 * step);
        if byte & 0x80 == 0 {
            return Some((value, at + 2 + step));
        }
    }
    None
}

/// Writes the length of a string that is not Huffman-coded.
fn write_length(length: usize, out: &mut Vec<u8>) {
    let Some(mut rest) = length.checked_sub(127) else {
        out.push(length as u8);
        return;
    };
    out.push(127);
    while rest >= 128 {
        out.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn literal(first: u8, value: &[u8], huffman_coded: bool) -> Vec<u8> {
        let mut out = vec![first];
        let bytes = if huffman_coded { huffman::encode(value) } else { value.to_vec() };
        let at = out.len();
        write_length(bytes.len(), &mut out);
        out[at] |= if huffman_coded { 0x80 } else { 0 };
        out.extend(bytes);
        out
    }

    #[test]
    fn an_invalid_authority_is_replaced_by_one_of_the_same_length() {
        for (value, replaced) in [
            ("/csi/csi.sock", true),
            ("%2Fcsi%2Fcsi.sock", true),
            ("unix:/run/csi.sock", true),
            ("localhost", false),
            ("127.0.0.1:9000", false),
            ("", false),
        ] {
            // With, without, and never indexed; plain and Huffman-coded.
            for first in [0x41, 0x01, 0x11] {
                for huffman_coded in [false, true] {
                    let block =
                        [vec![0x83, 0x86], literal(first, value.as_bytes(), huffman_coded), vec![0x3f, 0x01, 0xbe]]
                            .concat();
                    let want = [
                        vec![0x83, 0x86],
                        literal(first, "x".repeat(value.len()).as_bytes(), false),
                        vec![0x3f, 0x01, 0xbe],
                    ];
                    let changed = replace_authority(&block);
                    assert_eq!(changed, replaced.then(|| want.concat()), "{value} {first:#x} {huffman_coded}");
                }
            }
        }
        let other = [vec![0x44], vec![4], b"/a/b".to_vec()].concat();
        assert_eq!(replace_authority(&other), None, "a path is not an authority");
        let named = [literal(0x40, b":authority", true), literal(0, b"/a", false)[1..].to_vec()].concat();
        assert!(replace_authority(&named).is_some(), "the name may be a literal too");
        let long = "/x".repeat(200);
        let block = literal(0x41, long.as_bytes(), false);
        assert_eq!(replace_authority(&block).unwrap().len(), block.len());
    }

    #[test]
    fn all_other_bytes_pass_unchanged_in_pieces_of_any_size() {
        let frame = |kind: u8, flags: u8, payload: &[u8]| {
            let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
            out.extend([kind, flags, 0, 0, 0, 1]);
            out.extend(payload);
            out
        };
        let padded = [vec![3], vec![0; 5], literal(0x41, b"/a", false), vec![0; 3]].concat();
        let clean = [vec![0; 5], literal(0x41, b"xx", false)].concat();
        let input = [
            PREFACE.to_vec(),
            frame(4, 0, &[]),
            frame(HEADERS, END_HEADERS | PADDED | PRIORITY, &padded),
            frame(0, 1, &[0x41; 300]),
            frame(HEADERS, END_HEADERS, &[0xff; 40]),
            frame(HEADERS, 0, &literal(0x41, b"/a", false)),
        ];
        let want = [
            PREFACE.to_vec(),
            frame(4, 0, &[]),
            frame(HEADERS, END_HEADERS | PRIORITY, &clean),
            frame(0, 1, &[0x41; 300]),
            frame(HEADERS, END_HEADERS, &[0xff; 40]),
            frame(HEADERS, 0, &literal(0x41, b"/a", false)),
        ]
        .concat();
        let input = input.concat();
        for size in [1, 2, 7, 64, input.len()] {
            let (mut rewriter, mut out) = (FrameRewriter::default(), Vec::new());
            input.chunks(size).for_each(|piece| rewriter.rewrite(piece, &mut out));
            assert_eq!(out, want, "in pieces of {size}");
        }
        let (mut rewriter, mut out) = (FrameRewriter::default(), Vec::new());
        rewriter.rewrite(b"GET / HTTP/1.1\r\n", &mut out);
        assert_eq!(out, b"GET / HTTP/1.1\r\n");
    }
}
