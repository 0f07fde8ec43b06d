"""Writes the plan as batch scripts. Reading order: job → engine (Jinja and its quoting filters) → lint."""
