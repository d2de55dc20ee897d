"""From a command line to jobs: overrides, sweeps, the terminal."""
