"""Tool servers of shipped environments: verifiers starts each as ``python -m primerl_hpc.envs.tool_servers.<name>``.

They are not in the folders of their environments, because the module of a tool server must be importable by its full
name in another process.

Reading order: calculator → encyclopedia (an invented corpus) → search (full-text search in it).
"""
