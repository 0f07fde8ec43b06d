"""The chat template of a model's tokenizer: its settings, and what a renderer writes instead.

Reading order: template_settings → template_comparison.
"""
