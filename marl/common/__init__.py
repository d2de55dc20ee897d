"""Shared helpers: user errors, files, secrets, several processes."""
