"""
A stand-in for kube-scheduler (v1.36) with an extender, for simulations, benchmarks and tests.

It does what decides how often an extender is called and which pods it costs: one pod is filtered at a time, binds run beside
it, a refused pod is tried again at every event, and one that met an error after a pause that doubles. More important pods
preempt others. Of the scheduler's plugins it has only the one that counts the resources of nodes.
"""
