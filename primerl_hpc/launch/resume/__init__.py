"""Options of ``resume`` besides the next attempt: return to an earlier step, change safe keys.

Reading order: reserve → rewind → changes.
"""
