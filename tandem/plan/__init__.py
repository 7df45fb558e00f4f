"""Before and beside a run: what it needs of memory, and sweeps over ways of laying it out."""
