"""
Serves kube-scheduler's extender protocol over HTTP, by a `Scheduler`.

`arguments` decodes calls, and `extender_answers` encodes answers and has the texts of a pod's events and conditions.
`handlers` is the HTTP application, which `extender_server` serves. No answer depends on an earlier call.
"""
