"""The tool server of environment ``calculator``: verifiers starts it as ``python -m primerl_hpc.envs.calculator_tools``.

It is not beside the environment because a server's module must be importable in a process of its own.
"""

from __future__ import annotations

import verifiers.v1 as vf


class CalculatorTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """a + b"""
        return str(a + b)

    @vf.tool
    def multiply(self, a: int, b: int) -> str:
        """a * b"""
        return str(a * b)


if __name__ == "__main__":
    CalculatorTools.run()
