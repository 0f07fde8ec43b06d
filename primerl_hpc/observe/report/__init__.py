"""`report` (an HTML page), `samples` (recent rollouts) and `scores` (a figure).

Reading order: scores, samples → svg → report.
"""
