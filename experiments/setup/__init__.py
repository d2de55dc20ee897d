"""From a configuration to the parts of a run: players, models, devices, memory."""
