"""Compiled code for CPUs and packed rows. All of it is optional: without it the same is computed, slower."""
