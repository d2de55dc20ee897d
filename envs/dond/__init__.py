"""Deal or No Deal. envs/dond_v0.py is its face."""
