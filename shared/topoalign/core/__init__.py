"""
The decision logic of topoalign without I/O: what a node is, what a pod requests, and which devices it gets.

Nothing here does I/O, runs asynchronously, logs or reads a clock, so the node, the scheduler extender, the tests and a
notebook all call the same functions and get the same answers.
"""
