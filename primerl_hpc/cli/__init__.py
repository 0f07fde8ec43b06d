"""The command line: one thin module for each command, imported only when it is used, so that ``--help`` is fast.

Reading order: main (the table of commands, errors and exit codes) → aliases (earlier names of commands) → options
(shared options and helpers), values (arguments that a shell completes) → new, import_config, submit, plan, prefetch,
bundle, evaluate → status, logs, diagnose, top, stacks, profile, samples, scores, sync, report → cancel, exec, resume,
role (one process of a run, started manually) → du, prune, archive → chat, export, convert → env, doctor, bench,
calibrate → explain, completion.
"""
