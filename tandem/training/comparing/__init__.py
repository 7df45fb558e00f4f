"""A run's models beside each other and beside other models: what they are better at."""
