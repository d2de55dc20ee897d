"""Makes the parts of a run from its configuration: players, models, devices, memory."""
