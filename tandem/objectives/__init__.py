"""Pure tensor functions: log-probs, KL, rewards, advantages, losses.

Imports torch and nothing else of ours but the errors. Losses are sums; whoever knows the global
count divides, once.
"""
