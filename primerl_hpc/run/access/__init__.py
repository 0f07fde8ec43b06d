"""Access control of a run: ownership of its directory and of its parts elsewhere, and the keys of each attempt.

Reading order: ownership → elsewhere → keys → admission (what a connection without the key may cost).
"""
