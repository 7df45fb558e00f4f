"""Rows to samples: the shapes that data sets have, and what each column means."""
