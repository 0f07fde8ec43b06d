"""Submit runs and the jobs around them.

Reading order: submit → submission → prepare → software, environments (checks before submission) → hub_cache (folders of
the Hugging Face libraries) → executor → chain → follow_up → fork → cancel → evaluate. Subfolders: planning, new_recipe,
code, prefetch, bundle, doctor, bench, export, storage.
"""
