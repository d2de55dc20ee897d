"""Agents, who sit in games: language models, scripts, endpoints. base.py has the interface."""
