"""Several ranks from one command: start them, meet other nodes, say who failed, leave nothing."""
