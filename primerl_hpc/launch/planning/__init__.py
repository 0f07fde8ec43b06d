"""Predictions for a recipe on a profile: decide ``auto``, refuse what does not fit.

Reading order: learned (corrections of the ledger) → forecast → alternatives → screen, plan_lines (forecast and plan as
text) → hour_budget (``--budget``) → advice (what attempts measured: rows of the ledger, a faster split of the nodes).
"""
