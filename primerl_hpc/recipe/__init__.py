"""What to train: the YAML a user writes, as frozen models.

Reading order: schema → rollout_schema → training_schema → sft_schema → evaluation_schema → load → resolve → sft_rows → sft_tables → explain → renderer.
"""
