"""Predictions for a recipe on a profile: find the model's config.json, decide ``auto``, refuse what does not fit.

Reading order: metric_keys (metrics that a recipe names) → model_config → token_ids, chat_template → learned
(corrections of the ledger) → forecast → alternatives → screen → hour_budget (``--budget``).
"""
