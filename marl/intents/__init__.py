"""Intents: what a message is said for, as a pair of claims or of orders (FAIR 2022, Cicero)."""
