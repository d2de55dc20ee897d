"""Games x agents -> Episodes."""
