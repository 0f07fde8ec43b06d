"""Checks of a recipe before submission; each raises an error or returns a warning.

Reading order: metric_keys (metrics that a recipe names) → model_config (the config.json of its model) → token_ids →
software (Python environments of roles) → environments → chat_template.
"""
