"""The roles and their modes, optimizers, and the one place that divides a loss."""
