"""Keeps a run alive from its first process to its exit code.

Reading order: supervisor (the story) → policy (what an exit means, pure) → steps (the seam) → local_step | srun_step →
guard (one process tree, ended whole) → failures (the first fault, told once) → journal (what is written, and a run
directory that falters). Hangs: watchdog. Hosts: allocation → nodes → preflight →
node_checks (on every node).
"""
