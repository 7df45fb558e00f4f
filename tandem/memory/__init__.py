"""The memory that a step needs, by formula."""
