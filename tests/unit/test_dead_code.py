"""Code that nothing in the package or its tools uses is deleted, also if tests use it."""

from __future__ import annotations

from vulture import Vulture

from primerl_hpc.checks.table import CHECKS
from tests.support.helpers import ROOT

CALLED_BY_OTHERS = {
    "format_commands": "click",
    "get_command": "click",
    "list_commands": "click",
    "writelines": "file objects",
    "handle_starttag": "html.parser",
    "do_GET": "http.server",
    "log_message": "http.server",
    "handle_error": "http.server",
    "service_actions": "http.server",
    "check_here": "common.interpreters, by name",
    "count_tasks": "common.interpreters, by name",
    "data_types": "common.interpreters, by name",
    "find_faults": "common.interpreters, by name",
    "find_modules": "common.interpreters, by name",
    "install_if_missing": "common.interpreters, by name",
    "missing_modules": "common.interpreters, by name",
    "EngineRoutes": "vLLM, by name",
    "serve_tokens_full_generator": "vLLM",
    "CPUWeightUpdate": "vLLM, by name",
    "primerl_prepare_update": "vLLM's collective_rpc, by name",
    "primerl_discard_update": "vLLM's collective_rpc, by name",
    "primerl_update_weights": "vLLM's collective_rpc, by name",
    "ChatMLRenderer": "renderers, by name",
    "LiteralRenderer": "renderers, by name",
    "write_data": "torch's checkpoint writer",
    "record_exception": "torch's error handler",
    "_popen": "torch's elastic agent",
    "get_backend": "torch's rendezvous",
    "next_rendezvous": "torch's rendezvous",
    "is_closed": "torch's rendezvous",
    "set_closed": "torch's rendezvous",
    "num_nodes_waiting": "torch's rendezvous",
    "get_run_id": "torch's rendezvous",
    "multi_set": "torch's store",
    "compare_set": "torch's store",
    "has_extended_api": "torch's store",
    "__getattr__": "imports of names that stand for nothing",
    "__getitem__": "safetensors' slices",
    "update_indexer": "transformers' indexers",
    "_": "registered by a decorator of torch",
}
"""Functions, methods and classes that only other packages call, and who does."""
NAMED_IN_A_TABLE = {check.function.partition(":")[2] for check in CHECKS}
REGISTERED = ["@field_validator", "@model_validator", "@vf.metric", "@vf.reward"]
KINDS = ("class", "function", "method", "property")


def test_all_code_is_used() -> None:
    found = Vulture(ignore_decorators=REGISTERED)
    found.scavenge([str(ROOT / "primerl_hpc"), str(ROOT / "tools")])
    unused = {
        item.name: f"{item.filename}:{item.first_lineno}: {item.typ} {item.name}"
        for item in found.get_unused_code()
        if item.typ in KINDS and item.filename.is_relative_to(ROOT / "primerl_hpc")
    }
    assert not [
        text for name, text in unused.items() if name not in CALLED_BY_OTHERS.keys() | NAMED_IN_A_TABLE
    ]
    assert not CALLED_BY_OTHERS.keys() - unused.keys(), "no longer exceptions"
