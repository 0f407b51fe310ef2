"""
The admission webhook: what a pod must not say of itself, said when it is created.

`rules` judges a pod, and `reviews` is the AdmissionReview of Kubernetes around it. The API server asks twice: the mutating
webhook may change the pod, and the validating one sees what others have made of it.
"""
