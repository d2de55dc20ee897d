"""Grid Among Us. envs/among_us_v0.py is its face."""
