"""Prompts in, Rollout out. It does not depend on training.

`generator.generate` for rollouts and evaluation, `streaming` for chat and serving. Both use
`session` (continuous batching), which uses `scheduler` (which answers run and which wait), `blocks`
(KV memory), `batch_state` (the live answers as tensors), `runner` (the model) and `sampler`.
"""
