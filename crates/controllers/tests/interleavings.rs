//! Two binders and a provisioner at the same time, in every order that chance finds.
//!
//! A small model of the server: objects with revisions, writes that are refused when somebody else wrote first, a log of
//! what happened. Each actor sees the log late, in its own time, forgets wake-ups or gets them twice, and may die between
//! any two writes. What they decide and what they write is the real code; only the server and the driver are models.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

mod model;

use model::World;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn claims_and_volumes_agree_whatever_happens_in_between(tape in prop::collection::vec(any::<u16>(), 40..400)) {
        let mut world = World::new();
        for choice in tape {
            world.step(choice);
            world.check_always();
        }
        world.come_to_rest();
        world.check_at_rest();
    }
}

/// A few hundred random orders may miss a rare one; this takes more of them, as long as somebody asks for.
#[test]
fn many_seeds() {
    let seeds = std::env::var("CLEAT_TEST_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(300_u64);
    for seed in 0..seeds {
        let mut world = World::new();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for _ in 0..600 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            world.step((state >> 24) as u16);
            world.check_always();
        }
        world.come_to_rest();
        world.check_at_rest();
    }
}
