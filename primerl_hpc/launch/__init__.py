"""Submit runs and the jobs around them.

Reading order: compose (a run as one value) → checklist (what is checked of it) → submit (its directory and its job,
the next attempt) → queue (sbatch, and processes on this machine) → follow_up → fork → cancel → evaluate →
preview (what `plan` shows), planned_steps (how roles will be started) → hub_cache (folders of the Hugging Face
libraries). Subfolders: planning, checks (before submission), new_recipe, code, prefetch, bundle, doctor, bench, export,
resume, storage.
"""
