"""The copy of the code that a run executes: this package, and the modules that its recipe names.

Reading order: find_modules (called in the interpreters of the roles) → sources → package_zip → keep.
"""
