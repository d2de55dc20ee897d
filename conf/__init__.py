"""The settings of every command, composed by Hydra."""
