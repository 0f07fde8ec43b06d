"""One vLLM engine of a run: its arguments, its start, its additional routes, and how it loads new weights.

Reading order: engine_args → server → turns → routes → token_route → chat_requests → checkpoint → prefill →
token_responses → stores → vllm_compat (besides it, only `stores` and `worker.reload` import vLLM's internals) →
balancing (how the router selects an engine; pure). Subfolders: worker (code that runs in vLLM's worker processes),
load (load on engines, for benchmarks).
"""
