"""What is checked, tried and told before a run's first stage, so that nothing fails late."""
