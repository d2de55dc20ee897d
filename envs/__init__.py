"""Language games as PettingZoo parallel environments. Nothing here knows of torch."""
