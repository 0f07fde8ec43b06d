"""The policy: building, loading, and changes of the model for training.

Reading order: policy → families → load → head → lora → float32_modules → memory → replay, routing →
vision → rope → dropout → projections → comparison (of a family that no test compares).
"""
