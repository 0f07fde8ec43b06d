"""Code that runs in vLLM's worker processes.

Reading order: extension → start_times → reload → false_warnings → stacked_experts → mirror → cpu_worker.
"""
