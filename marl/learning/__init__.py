"""Episodes -> gradient: batch, advantages, forward pass, update."""
