"""Run folders, checkpoints and trackers."""
