//! The behaviour of each kind: [`strategy`] holds one file per built-in kind, [`custom`] the kinds that
//! CustomResourceDefinitions add, [`catalog`] the kinds that are served at the moment.
//!
//! Strategies are pure. A rule that needs other objects is admission and belongs to the API server.

pub mod catalog;
pub mod custom;
pub mod reader;
pub mod strategy;
