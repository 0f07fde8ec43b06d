"""The blocks of a recipe, one module for each part of the YAML file, and the checks across blocks.

A block is a frozen pydantic model. The docstring under each field is its documentation: ``primerl-hpc explain KEY``
prints it, and ``primerl-hpc explain --schema`` writes it into the JSON schema.

Reading order: recipe (the root block) → model, layout → rollout, selection, algorithm → training, sft → evaluation,
after, run → cross_checks (rules that involve more than one block).
"""
