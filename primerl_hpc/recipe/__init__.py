"""What to train: the YAML a user writes, as frozen models.

Reading order: schema → combinations → model_schema, layout_schema, run_schema → rollout_schema, selection_schema,
algorithm_schema → training_schema, sft_schema → evaluation_schema, after_schema → load → resolve, hub → sft_rows, sft_tables →
explain → renderer.
"""
