"""FP8 training: the matrix products of linear layers and experts in 8-bit floats (``trainer.fp8``).

Reading order: formats (values and scales) → products (forward and gradients) → layers (the modules) → gpu (torchao).
"""
