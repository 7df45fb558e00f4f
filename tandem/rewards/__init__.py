"""Reward functions: found by name, run in worker processes under limits, checked, shipped."""
