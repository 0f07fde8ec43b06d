"""Fetch what a run needs from the internet on a login node, and check before submission that it is there.

Reading order: needs (what a recipe and a profile need) → inventory (what the caches contain) → fetch (downloads and
verifies) → images (container images as files) → packages (of environments) → prefetch (one need after the other, under
a lock) → check (refusals of submit).
"""
