"""Chat templates: what they are, what they write, and how it is read back."""
