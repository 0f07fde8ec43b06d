"""Checks of a cluster before the first run.

Reading order: cluster → site, images (also before submission) → quotas → machine → network → nodes → mismatch (engine
against trainer, for a model).
"""
