"""The language model of every seat: tokens, weights and value head, optimisers, parameters split over processes."""
