"""Data that crosses between roles: packed rollouts (orchestrator → trainer) and weights (trainer → engines).

Reading order: tensor_file → store → members → turns. Subfolders: rollouts, weights, base_models. To add a transport:
see the docstrings of `rollouts.types` and `weights.types`.

The orchestrator runs without torch, so modules here use only NumPy and safetensors. The exceptions are `store`,
`members` and `weights.broadcast_group`, which only processes with torch import.
"""
