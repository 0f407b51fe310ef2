"""
The requests that come over the bus: admissions, releases, predictions and explanations, with deadlines and refusals.

The kubelet's calls are in `device_plugin`.
"""
