"""
Reads and validates a pod once, when it arrives, into what the decision uses.

`pod_demand.read_pod` validates a PodRequest and turns it into a PodDemand. Hints, policy, placement and explanation take the
demand, of one container or of the pod as a whole; none of them looks at requests, limits or annotations again.
"""
