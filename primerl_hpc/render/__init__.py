"""Render the plan as batch scripts.

Reading order: requests → job → bundle (what a node runs first) → engine (Jinja and its quoting filters) → lint.
"""
