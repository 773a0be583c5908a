"""What a cluster's updates reveal: clipping, Gaussian noise with its accounting, and secure aggregation."""
