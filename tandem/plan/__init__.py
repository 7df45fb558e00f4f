"""What a run needs: its memory by formula, and sweeps that measure it."""
