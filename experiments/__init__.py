"""The commands, and one folder for each published table."""
