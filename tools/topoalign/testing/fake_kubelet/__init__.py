"""
A kubelet for tests, the demo and laptops. Its files are as untidy as those of a real one.

There is one module per manager, as in the kubelet's own code; `kubelet` combines them, `plugins` and `pod_resources`
are its sides of the two APIs.
"""
