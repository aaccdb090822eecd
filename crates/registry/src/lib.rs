//! The behaviour of each API kind: [`strategy`] has one file per built-in kind, [`custom`] the kinds of
//! CustomResourceDefinitions with their schemas and CEL rules, [`catalog`] the set of served kinds, and [`reader`] typed
//! access to stored objects.
//!
//! Strategies and custom kinds are pure. A rule that needs other objects is admission and belongs to the API server.

pub mod catalog;
pub mod custom;
pub mod reader;
pub mod strategy;
