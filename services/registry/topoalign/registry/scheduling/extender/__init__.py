"""
kube-scheduler's extender protocol: the scheduler asks over HTTP, and a `Scheduling` answers.

`arguments` reads what the scheduler sends, `answers` writes what it reads, and `refusals` has the texts that a pod's events
and conditions show. `pages` is the HTTP application, `connection` and `certificates` are how it is served. Nothing here
decides about nodes, and nothing that was answered is kept for the next call.
"""
