"""
The requests of the bus: admissions, releases, predictions and explanations, with their deadlines and refusals.

The kubelet's calls are in `device_plugin`.
"""
