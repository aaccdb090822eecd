//! Property test: two binders and a provisioner run concurrently, in random interleavings.
//!
//! The server is a model: objects with revisions, writes that are refused if the revision has changed, and an event
//! log. Each actor reads the log with its own delay, loses wake-ups or gets them twice, and may restart between any two
//! writes. The decisions and the written objects come from the real code; only the server and the driver are models.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

mod model;

use model::Simulation;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn claims_and_volumes_agree_in_every_interleaving(tape in prop::collection::vec(any::<u16>(), 40..400)) {
        let mut simulation = Simulation::new();
        for choice in tape {
            simulation.step(choice);
            simulation.check_invariants();
        }
        simulation.run_until_idle();
        simulation.check_idle_invariants();
    }
}

/// Runs more interleavings than the property test; `CLEAT_TEST_SEEDS` sets the number.
#[test]
fn claims_and_volumes_agree_for_many_seeds() {
    let seeds = std::env::var("CLEAT_TEST_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(300_u64);
    for seed in 0..seeds {
        let mut simulation = Simulation::new();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for _ in 0..600 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            simulation.step((state >> 24) as u16);
            simulation.check_invariants();
        }
        simulation.run_until_idle();
        simulation.check_idle_invariants();
    }
}
