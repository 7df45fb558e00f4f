"""Prompts in, Rollout out. Knows nothing of training.

`generator.generate` for rollouts and evaluation, `conversations` for chat and serving. Inside:
`session` (continuous batching) over `scheduler` (who runs, who waits), `blocks` (KV memory),
`rows` (the live answers as tensors), `runner` (the model) and `sampler` (how a token is drawn).
"""
