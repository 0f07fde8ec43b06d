"""One vLLM engine of a run: its arguments, its start, its extra routes and how it takes new weights.

Reading order: engine_args (recipe → vLLM's command line) → server (bind, load, serve, publish) → routes (API key,
/pause, /update_weights, /resume, /primerl/state) → extension (inside vLLM's workers) → checkpoint (what may be loaded)
→ vllm_compat (the only file that imports vLLM's internals).
"""
