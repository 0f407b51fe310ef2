"""
A stand-in for Kubernetes' API server, for simulations, benchmarks and tests. It is as untidy as a real one.

`objects` keeps objects with their versions and what changed; `pods` has the rules for pods; `faults` is what goes wrong on
demand; `server` is the HTTP side. Nothing is checked for permissions or against schemas.
"""
