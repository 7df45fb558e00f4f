"""Every knob, once. See `schema` for the knobs and `load` for files and checks."""
