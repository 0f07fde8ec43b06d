"""Checks of machines, nodes and sites before a run: a table of facts, from which `doctor` and the preflight select.

Reading order: findings → table → doctor (selects the checks of a login node) → node (the program that runs those of a
node) → site, images (also before a submission) → cluster → login, quotas → machine → surroundings → gpus → ranks
(measurements over several nodes) → sums → network → nodes (all of it on nodes of the site, for `doctor --nodes`) →
mismatch (engine against trainer, for a model). Subfolder: recipe (before a submission).
"""
