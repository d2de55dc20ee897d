"""Metrics of games, beliefs and talk, with intervals; tables of runs."""
