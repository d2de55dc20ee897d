"""What is measured of games, beliefs and talk, with intervals."""
