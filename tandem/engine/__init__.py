"""The roles of RLHF on weights that train and generate, and their updates.

`hybrid.RLHFEngine` holds the roles; `placement` loads a model and lays it out over the ranks;
`learner.Learner` is a model in training; `update` takes its steps; `forward` runs batches.
"""
