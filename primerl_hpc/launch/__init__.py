"""Submits. Reading order: submit (new, resumed, prepared only) → prepare (the frozen run directory) → fork → executor."""
