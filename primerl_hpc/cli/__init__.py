"""The command line: one thin module for each command, imported only when it is used, so that ``--help`` is fast.

Reading order: main (the table of commands, errors and exit codes) → options (shared options and helpers) → new,
submit, plan, render, evaluate, resume, cancel → status, list_runs, logs, diagnose, samples, scores, report, chat,
export → env, doctor, calibrate, explain, schema → role (one process of a run, started manually), bench_options (speed
of the trainer), loop_bench (of engines and loop).
"""
