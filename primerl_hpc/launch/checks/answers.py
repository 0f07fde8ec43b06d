"""Answer questions about a recipe in the interpreter of a role: ``python -m primerl_hpc.launch.checks.answers``.

    stdin   {"function": "primerl_hpc.envs.lookup:find_faults", "request": […]}      a line for each question
    stdout  {"answer": {"has_verifiers": true, "faults": []}}                        what the function returns

Ends at the end of stdin, or with the traceback of an exception.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from primerl_hpc.common.node.imports import without_collections
from primerl_hpc.common.node.transformers_folders import read_models_once


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # packages may print while they are imported, also from C
    read_models_once()
    for line in sys.stdin:
        question = json.loads(line)
        module, _, name = question["function"].partition(":")
        with without_collections():
            answer = getattr(importlib.import_module(module), name)(question["request"])
        print(json.dumps({"answer": answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
