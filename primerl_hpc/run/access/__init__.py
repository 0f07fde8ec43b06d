"""Access control of a run: ownership of its directory and of its parts elsewhere, keys, temporary folders.

Reading order: ownership → elsewhere → keys → admission (what a connection without the key may cost) →
private_tmp (the folder of a run on each node).
"""
