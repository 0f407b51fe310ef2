"""
The admission webhook, which denies invalid pods when they are created.

`pod_review` checks a pod, and `reviews` handles the AdmissionReview of Kubernetes around it. The API server asks twice: the
mutating webhook may change the pod, and the validating one sees it with the changes of others.
"""
