"""Pack a Python environment into one file, and check such a file before submission.

Reading order: build (entry point: writes the archive and its manifest, and tries it) → environment (the files of an
environment as a relocatable folder) → inspect_python (called in the interpreter) → run_path (where its programs look
for libraries) → formats → manifest (facts of a bundle, and the checks of submit).
"""
