"""State in, folder out, and back. Knows nothing of what is in the state."""
