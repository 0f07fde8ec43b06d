"""Base models from the shared filesystem to node-local scratch, so that it is read once, not once for each engine.

Reading order: hub_cache (where the Hugging Face libraries keep models) → snapshots (of the hub, in the local cache) →
chunks (a model's files as chunks, with checksums) → peers (chunks between nodes over HTTPS) → staging (one copy per
node) → engine_options (options with which vLLM computes what the trainer computes) → quantized (checkpoints in FP8,
MXFP4 or packed integers, read as bfloat16) → untrained (tensors that the trainer does not load).
"""
