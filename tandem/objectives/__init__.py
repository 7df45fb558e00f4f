"""Pure tensor functions: log-probs, KL, rewards, advantages, losses."""
