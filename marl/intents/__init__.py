"""Intents: what a message of Deal or No Deal is said for, as a pair of claims (FAIR 2022, Cicero)."""
