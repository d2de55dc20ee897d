"""Commands that study finished runs: conditions, cross-play, drift, iterations, frontier."""
