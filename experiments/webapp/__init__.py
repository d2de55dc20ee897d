"""The web page: play against models, watch recorded games, follow runs."""
