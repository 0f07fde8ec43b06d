"""Submit runs and the jobs around them.

Reading order: submit → submission → prepare → hub_cache (folders of the Hugging Face libraries) → executor → chain →
planned_steps (how roles will be started) → follow_up → fork → cancel → evaluate. Subfolders: planning, checks (before
submission), new_recipe, code, prefetch, bundle, doctor, bench, export, resume, storage.
"""
