"""Planning near a human-like anchor: piKL's solvers, and the agents that use them."""
