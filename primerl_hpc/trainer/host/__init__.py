"""Host memory of the trainer.

Reading order: slabs → forked_ranks (ranks on CPUs share the memory of what they import).
"""
