"""The training loops: PPO, filtered behaviour cloning, RL-DiL-piKL."""
