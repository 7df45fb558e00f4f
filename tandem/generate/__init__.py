"""Prompts in, Rollout out."""
