"""
Test doubles that are product code: they pass the same contract tests as the real parts, and the demo uses them.

The memory bus is not here: a node agent uses it as the bus of its own services (`runtime.node_bus`).
"""
