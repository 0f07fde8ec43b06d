"""Tool server of environment ``calculator``."""

from __future__ import annotations

import verifiers.v1 as vf


class CalculatorTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    # the model sees the docstrings of the tools
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
