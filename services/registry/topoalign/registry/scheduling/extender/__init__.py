"""
Serves kube-scheduler's extender protocol over HTTP, with a `Scheduler`.

`arguments` decodes calls. `extender_answers` encodes answers and has the refusal texts.
`handlers` is the HTTP application, which `extender_server` serves. No answer depends on an earlier call.
"""
