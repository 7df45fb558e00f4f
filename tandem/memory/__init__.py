"""What a step needs of memory, by formula."""
