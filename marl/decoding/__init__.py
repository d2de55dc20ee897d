"""Batched incremental decoding: a cache slot for each stream, passes over new tokens, sampling."""
