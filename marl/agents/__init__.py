"""Who can sit in a game: language models, scripts, endpoints. base.py has the interface."""
