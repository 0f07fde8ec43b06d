"""Load on engines, for ``primerl-hpc bench inference``.

Reading order: timing (what is measured of a request, pure) → client (one streamed request) → levels (closed and open
loops).
"""
