"""Data types of parts of the model.

Reading order: float32_modules (`TrainerConfig.float32`).
"""
