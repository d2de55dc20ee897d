"""Diplomacy. envs/diplomacy_v0.py is its face."""
