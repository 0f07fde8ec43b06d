"""What to train: the YAML a user writes, as frozen models.

Reading order: schema → rollout_schema → training_schema → load → resolve → sft_rows → explain → renderer.
"""
