"""What crosses between roles: packed rollouts (orchestrator → trainer) and weights (trainer → engines).

Reading order: rollouts (the data and its protocol) → rollouts_filesystem → weights → weights_filesystem →
delta_codec → weights_delta → weights_broadcast → broadcast_group.
Only NumPy and safetensors: no torch here, because the orchestrator has none; broadcast_group, for trainer and engines alone, needs it.
"""
