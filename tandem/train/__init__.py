"""One readable stage each."""
