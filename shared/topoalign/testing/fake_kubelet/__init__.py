"""
A kubelet for places that have none: tests, the demo, a laptop. As untidy as a real one.

One module per manager, as in the kubelet's own code; `kubelet` puts them together, `plugins` and `pod_resources` are its
sides of the two APIs.
"""
