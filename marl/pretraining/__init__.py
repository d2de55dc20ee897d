"""The base model: a small language model trained on scripted or human games before any reinforcement."""
