"""Assess a plan before it is queued: does it fit, which side is the bottleneck, how long does it take, what is better.

Reading order: choice (the layout that is assessed) → case (recipe, model and GPUs; inputs of the formulas) → parts
(memory and times of both sides) → prefilling (engines for prompts) → colocated (both on the same GPUs) → balance (the
simulation) → prediction (all figures) → rules (rules of thumb) → variants (options of the trainer), search (``auto``) →
remedy (the smallest change that fits) → settle (``auto`` without a prediction).
"""
