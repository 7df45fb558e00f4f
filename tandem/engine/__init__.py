"""The roles and their modes, optimizers, and the one place that divides a loss.

`hybrid.RLHFEngine` holds the four roles, `optimizer.Learner` trains one of them, `forward` runs
them over batches, `ema` averages the actor.
"""
