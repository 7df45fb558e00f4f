"""Prompts in, Rollout out. Knows nothing of training.

`generator.generate` for rollouts and evaluation, `generator.stream` for chat, `sampler` for how a
token is drawn.
"""
