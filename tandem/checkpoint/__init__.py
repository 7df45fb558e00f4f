"""State in, folder out, and back."""
