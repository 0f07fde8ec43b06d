"""Writes the plan as batch scripts. Reading order: engine (Jinja and its quoting filters) → job."""
