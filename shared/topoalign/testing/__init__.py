"""
Stand-ins that are product code: they are held to the same contract tests as what they stand for, and the demo runs on them.

The memory bus is not here: a node agent uses it to have its own services beside NATS (`runtime.node_bus`).
"""
