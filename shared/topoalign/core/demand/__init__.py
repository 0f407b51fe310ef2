"""
A pod as the decision reads it: once, when it arrives.

`pod_demand.read_pod` validates a PodRequest and turns it into a PodDemand. Hints, policy, placement and explanation take the
demand, of one container or of the pod as a whole; none of them looks at requests, limits or annotations again.
"""
