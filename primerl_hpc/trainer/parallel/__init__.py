"""How the trainer's ranks share one model and one sequence.

Reading order: mesh (which ranks do what together) → expert, dispatch, deepep (experts spread over ranks) → context,
attention, ring (one sequence spread over ranks). All of it attaches to transformers' attention and experts interfaces.
"""
