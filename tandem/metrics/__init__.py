"""Every metric's name, unit and meaning; where they are written; the report."""
