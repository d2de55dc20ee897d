"""Makes jobs of a command line: overrides, sweeps, the terminal."""
