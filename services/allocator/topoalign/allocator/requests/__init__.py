"""
What is asked over the bus: admissions, releases, predictions and explanations, with their deadlines and refusals.

What the kubelet asks comes in by `device_plugin`.
"""
