"""Submit runs and the jobs around them.

Reading order: compose (a run as one value) → checklist (what is checked of it) → submit (its directory and its job,
the next attempt) → queue (sbatch, and processes on this machine) → follow_up → fork → cancel → evaluate →
preview (what `plan` shows), planned_steps (how roles will be started). Subfolders: planning, new_recipe, bench, resume,
storage.
"""
