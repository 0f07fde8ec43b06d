"""Recipes: the YAML file that describes what to train, as frozen models.

Reading order: schema (the blocks and the checks across them), sampling_rules, schedules → load (YAML to `Recipe`) →
resolve, hub (names to files) → custom_code → explain → sft (rows of demonstrations) → renderer → control_tokens,
stop_tokens → chatml, literal_renderer → template_settings → template_comparison (a renderer against the tokenizer's own
chat template).
"""
