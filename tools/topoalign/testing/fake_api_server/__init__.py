"""
A stand-in for Kubernetes' API server, for simulations, benchmarks and tests. It is as untidy as a real one.

`objects` keeps objects with their versions and what changed; `cluster` has the rules for pods; `server` is the HTTP side;
`watching` has lists in pages and watches, and `faults` is what goes wrong on demand. Nothing is checked for permissions or
against schemas.
"""
