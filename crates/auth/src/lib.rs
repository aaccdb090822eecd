//! Who makes a request, and what the caller may do.
//!
//! [`authenticate`] turns a connection and its headers into a [`authenticate::Caller`]; [`impersonate`] replaces the
//! caller where the request asks for that; [`authorize`] decides whether the caller may do what the request asks;
//! [`write_authorization`] checks what the caller writes into objects that it may write. [`audit`] records every
//! request.
//!
//! This crate decides; it stores no objects.

pub mod actor;
pub mod audit;
pub mod authenticate;
pub mod authorize;
pub mod impersonate;
pub mod pki;
pub mod request_info;
pub mod write_authorization;
