"""Benches: Tandem beside what a user would write or pick instead, alternating in one run."""
