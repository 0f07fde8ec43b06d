"""Export of a policy version, or of a quantized model, as a model folder.

Reading order: export → merge → untrained_tensors → convert → push (to the Hugging Face hub).
"""
