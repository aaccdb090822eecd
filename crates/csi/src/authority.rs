//! Accepts callers that name the socket's path as the authority: older gRPC libraries of several languages do, as it is or
//! percent-encoded. HTTP libraries refuse such a request before anybody here sees it.
//!
//! So the authority is replaced on the way in, in the header block itself, by one of the same length: the caller's
//! compression table and ours then stay equal, and what it refers to later is the replacement. Everything else passes as
//! it came; a header block in several frames, which no such caller sends, passes unchanged.
use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

use crate::huffman;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// More headers than any caller of ours sends; what is longer is not held back.
const MOST_HEADERS: usize = 64 * 1024;
/// `:authority` in HPACK's static table.
const AUTHORITY: u64 = 1;

/// A connection whose incoming requests always have an authority that HTTP allows.
pub(crate) struct Lenient<S> {
    inner: S,
    rewriter: Rewriter,
    ready: Vec<u8>,
    given: usize,
    ended: bool,
}

impl<S> Lenient<S> {
    pub(crate) fn new(inner: S) -> Lenient<S> {
        Lenient { inner, rewriter: Rewriter::default(), ready: Vec::new(), given: 0, ended: false }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Lenient<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if this.given < this.ready.len() {
                let length = out.remaining().min(this.ready.len() - this.given);
                out.put_slice(&this.ready[this.given..this.given + length]);
                this.given += length;
                return Poll::Ready(Ok(()));
            }
            if this.ended {
                return Poll::Ready(Ok(()));
            }
            this.ready.clear();
            this.given = 0;
            let mut bytes = [0; 8192];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.inner).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                this.ended = true;
                this.ready.append(&mut this.rewriter.held);
            } else {
                this.rewriter.feed(read.filled(), &mut this.ready);
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Lenient<S> {
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

impl<S: Connected> Connected for Lenient<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> S::ConnectInfo {
        self.inner.connect_info()
    }
}

#[derive(Default)]
struct Rewriter {
    place: Place,
    /// Bytes that wait for the rest of their frame.
    held: Vec<u8>,
}

#[derive(Default)]
enum Place {
    #[default]
    Preface,
    /// Before a frame.
    Frame,
    /// In a frame of no interest.
    Inside(usize),
    /// Not HTTP/2, and not ours to judge.
    Elsewhere,
}

impl Rewriter {
    fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let mut held = std::mem::take(&mut self.held);
        held.extend_from_slice(bytes);
        let mut at = 0;
        while let Some(length) = self.step(&held[at..], out) {
            at += length;
        }
        held.drain(..at);
        self.held = held;
    }

    /// Takes the next piece from the start of `bytes` if it is complete, and says how long it was.
    fn step(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Option<usize> {
        let length = match self.place {
            _ if bytes.is_empty() => return None,
            Place::Preface if PREFACE.starts_with(&bytes[..bytes.len().min(PREFACE.len())]) => {
                if bytes.len() < PREFACE.len() {
                    return None;
                }
                self.place = Place::Frame;
                PREFACE.len()
            }
            Place::Preface | Place::Elsewhere => {
                self.place = Place::Elsewhere;
                bytes.len()
            }
            Place::Inside(left) => {
                let length = left.min(bytes.len());
                self.place = if length == left { Place::Frame } else { Place::Inside(left - length) };
                length
            }
            Place::Frame => {
                let header = bytes.get(..FRAME_HEADER)?;
                let length = usize::from(header[0]) << 16 | usize::from(header[1]) << 8 | usize::from(header[2]);
                let (kind, flags) = (header[3], header[4]);
                if kind == HEADERS && flags & END_HEADERS != 0 && length <= MOST_HEADERS {
                    let payload = bytes.get(FRAME_HEADER..FRAME_HEADER + length)?;
                    if let Some(new) = rewrite(payload, flags) {
                        out.extend_from_slice(&(new.len() as u32).to_be_bytes()[1..]);
                        out.extend_from_slice(&[kind, flags & !PADDED]);
                        out.extend_from_slice(&header[5..]);
                        out.extend_from_slice(&new);
                        return Some(FRAME_HEADER + length);
                    }
                    FRAME_HEADER + length
                } else {
                    self.place = if length == 0 { Place::Frame } else { Place::Inside(length) };
                    FRAME_HEADER
                }
            }
        };
        out.extend_from_slice(&bytes[..length]);
        Some(length)
    }
}

/// The payload of a HEADERS frame with another authority and without padding; nothing if it can stay as it is.
fn rewrite(payload: &[u8], flags: u8) -> Option<Vec<u8>> {
    let mut block = payload;
    if flags & PADDED != 0 {
        let (padding, rest) = block.split_first()?;
        block = rest.get(..rest.len().checked_sub(usize::from(*padding))?)?;
    }
    let (priority, block) = block.split_at_checked(if flags & PRIORITY != 0 { 5 } else { 0 })?;
    let changed = replace_authority(block)?;
    Some([priority, &changed].concat())
}

fn replace_authority(block: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let (mut at, mut copied) = (0, 0);
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
        let mut is_authority = index.0 == AUTHORITY;
        if index.0 == 0 {
            let (name, end) = string(block, at)?;
            is_authority = name.decode()? == b":authority";
            at = end;
        }
        let (value, end) = string(block, at)?;
        if is_authority {
            let text = value.decode()?;
            if !text.is_empty() && http::uri::Authority::try_from(text.as_slice()).is_err() {
                out.extend_from_slice(&block[copied..at]);
                write_length(text.len(), &mut out);
                out.resize(out.len() + text.len(), b'x');
                copied = end;
            }
        }
        at = end;
    }
    if copied == 0 {
        return None;
    }
    out.extend_from_slice(&block[copied..]);
    Some(out)
}

struct Text<'a> {
    huffman: bool,
    bytes: &'a [u8],
}

impl Text<'_> {
    fn decode(&self) -> Option<Vec<u8>> {
        if self.huffman { huffman::decode(self.bytes) } else { Some(self.bytes.to_vec()) }
    }
}

/// A string at `at`, and where it ends.
fn string(block: &[u8], at: usize) -> Option<(Text<'_>, usize)> {
    let huffman = block.get(at)? & 0x80 != 0;
    let (length, start) = integer(block, at, 7)?;
    let end = start.checked_add(usize::try_from(length).ok()?)?;
    Some((Text { huffman, bytes: block.get(start..end)? }, end))
}

/// An integer that begins in the low `bits` bits at `at`, and where it ends.
fn integer(block: &[u8], at: usize, bits: u32) -> Option<(u64, usize)> {
    let most = (1u64 << bits) - 1;
    let mut value = u64::from(*block.get(at)?) & most;
    if value < most {
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

    fn literal(first: u8, value: &[u8], coded: bool) -> Vec<u8> {
        let mut out = vec![first];
        let bytes = if coded { huffman::encode(value) } else { value.to_vec() };
        let at = out.len();
        write_length(bytes.len(), &mut out);
        out[at] |= if coded { 0x80 } else { 0 };
        out.extend(bytes);
        out
    }

    #[test]
    fn only_an_authority_that_http_refuses_is_replaced_and_by_one_as_long() {
        for (value, replaced) in [
            ("/csi/csi.sock", true),
            ("%2Fcsi%2Fcsi.sock", true),
            ("unix:/run/csi.sock", true),
            ("localhost", false),
            ("127.0.0.1:9000", false),
            ("", false),
        ] {
            // With indexing, without, and never; plain and coded.
            for first in [0x41, 0x01, 0x11] {
                for coded in [false, true] {
                    let block =
                        [vec![0x83, 0x86], literal(first, value.as_bytes(), coded), vec![0x3f, 0x01, 0xbe]].concat();
                    let want = [
                        vec![0x83, 0x86],
                        literal(first, "x".repeat(value.len()).as_bytes(), false),
                        vec![0x3f, 0x01, 0xbe],
                    ];
                    let changed = replace_authority(&block);
                    assert_eq!(changed, replaced.then(|| want.concat()), "{value} {first:#x} {coded}");
                }
            }
        }
        let other = [vec![0x44], vec![4], b"/a/b".to_vec()].concat();
        assert_eq!(replace_authority(&other), None, "a path is not an authority");
        let named = [literal(0x40, b":authority", true), literal(0, b"/a", false)[1..].to_vec()].concat();
        assert!(replace_authority(&named).is_some(), "by its name");
        let long = "/x".repeat(200);
        let block = literal(0x41, long.as_bytes(), false);
        assert_eq!(replace_authority(&block).unwrap().len(), block.len());
    }

    #[test]
    fn whatever_the_pieces_all_else_passes_unchanged() {
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
            let (mut rewriter, mut out) = (Rewriter::default(), Vec::new());
            input.chunks(size).for_each(|piece| rewriter.feed(piece, &mut out));
            assert_eq!(out, want, "in pieces of {size}");
        }
        let (mut rewriter, mut out) = (Rewriter::default(), Vec::new());
        rewriter.feed(b"GET / HTTP/1.1\r\n", &mut out);
        assert_eq!(out, b"GET / HTTP/1.1\r\n");
    }
}
