"""The strategies inside a Trainer: every process of the cluster takes part, its leader speaks to the others."""
