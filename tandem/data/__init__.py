"""Rows in, token rows out: reading, shaping, splitting, rendering, ordering."""
