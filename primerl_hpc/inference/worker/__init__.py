"""Code that runs in vLLM's worker processes.

Reading order: extension → start_times → reload → stacked_experts → mirror → cpu_worker.
"""
