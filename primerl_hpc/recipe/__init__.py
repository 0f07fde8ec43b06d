"""What to train: the YAML a user writes, as frozen models.

Reading order: schema → combinations → layout_schema → run_schema → rollout_schema → algorithm_schema → training_schema → sft_schema → evaluation_schema → load → resolve → sft_rows → sft_tables → explain → renderer.
"""
